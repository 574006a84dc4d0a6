"""Maps a model's token ids to text without its tokenizer, for decoding answers.

Immutable once built, so threads may share it.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pdserve.text.errors import TextError, UnsupportedTokenizer
from pdserve.text.tokenizer.detokenizer import MAX_TOKEN_CHARS, IncrementalDetokenizer, TokenBytes


@dataclass(frozen=True, slots=True)
class TextModelInfo:
    """What a tokenizer and a chat template need to know of a model beyond tokenizer.json.

    vocab_size: rows of the model's embedding; may exceed the tokenizer's vocabulary.
    eos_ids: any of them ends a text; the first is the template's `eos_token`.
    bos_id: the template's `bos_token`; None if the model has none.
    adds_bos: a prompt without a template begins with bos_id.
    """

    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    adds_bos: bool = False


class Vocabulary:
    """Converts token ids to text, for one model."""

    def __init__(
        self, model_info: TextModelInfo, token_bytes: TokenBytes, special_ids: frozenset[int]
    ) -> None:
        self.model_info = model_info
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._skipped: dict[frozenset[str], frozenset[int]] = {}  # by the kept texts

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids, as `incremental` produces it. Raises TextError if an id is
        outside [0, vocab_size)."""
        self.check_ids(ids)
        detokenizer = self.incremental(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def incremental(
        self,
        *,
        skip_special_tokens: bool = True,
        keep: frozenset[str] = frozenset(),
        continues: bool = False,
    ) -> IncrementalDetokenizer:
        """Return a detokenizer for one choice. `keep`: texts whose special tokens are not
        skipped. `continues`: keep a leading space, since a prompt precedes."""
        skip = self._hidden_ids(keep) if skip_special_tokens else frozenset()
        return IncrementalDetokenizer(self._token_bytes, skip, continues)

    def _hidden_ids(self, keep: frozenset[str]) -> frozenset[int]:
        """Return the ids of special tokens in no text of `keep`; cached, as parsers use few
        sets."""
        ids = self._skipped.get(keep)
        if ids is None:
            pieces = ((i, self.token_piece(i)) for i in self._special_ids)
            ids = self._skipped[keep] = frozenset(
                i for i, piece in pieces if not (piece and any(piece in text for text in keep))
            )
        return ids

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises TextError if an id is outside [0, vocab_size)."""
        size = self.model_info.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            invalid_id = next(token for token in ids if not 0 <= token < size)
            raise TextError(f"token id {invalid_id} is outside the vocabulary of {size} tokens")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; they may contain partial characters."""
        return self._token_bytes.bytes_of(token)

    def token_piece(self, token: int) -> str:
        """Return a token as the vocabulary writes it, e.g. "\u0120hello"; "" if it has none."""
        return self._token_bytes.piece_of(token)

    def token_text(self, token: int) -> str:
        """Return the text of one token alone; partial characters become U+FFFD."""
        return self._token_bytes.bytes_of(token).decode("utf-8", "replace")


class StoredTokens:
    """The tokens of a vocabulary by id, in one buffer; tokens without text are empty."""

    def __init__(self, sizes: bytes, text: bytes) -> None:
        """Initialize with `sizes`, the byte length of each token as native unsigned 32-bit
        integers, and `text`, all tokens concatenated in UTF-8."""
        self._ends = array("Q", accumulate(memoryview(sizes).cast("I"), initial=0))
        self._text = text

    def __call__(self, token: int) -> str:
        if not 0 <= token < len(self._ends) - 1:
            return ""
        return self._text[self._ends[token] : self._ends[token + 1]].decode()


def store_tokens(tokens: Sequence[str | None]) -> tuple[bytes, bytes]:
    """Return the sizes and the text of StoredTokens. Raises UnsupportedTokenizer if a token is
    longer than MAX_TOKEN_CHARS."""
    longest = max((len(token or "") for token in tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise UnsupportedTokenizer(
            f"tokenizer.json has a token of {longest} characters, which is too long"
        )
    encoded = [(token or "").encode() for token in tokens]
    return array("I", map(len, encoded)).tobytes(), b"".join(encoded)


def stored_vocabulary(
    model_info: TextModelInfo,
    decoder: Mapping[str, Any],
    special_ids: Sequence[int],
    tokens: StoredTokens,
) -> Vocabulary:
    """Build a Vocabulary. `decoder`: the state of the tokenizer's decoder (detokenizer.py). Raises
    UnsupportedTokenizer if the decoder is not supported."""
    return Vocabulary(model_info, TokenBytes(tokens, decoder), frozenset(special_ids))
