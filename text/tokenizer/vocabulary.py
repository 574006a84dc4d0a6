"""Converts a model's token ids to text without its tokenizer, so that the gateway can decode
answers.

A vocabulary does not change once built, so threads may share it.
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
    """Facts about a model that its tokenizer and chat template need and tokenizer.json lacks.

    vocab_size: rows of the model's embedding; may exceed the tokenizer's vocabulary.
    eos_ids: tokens that end a text; the first is the template's `eos_token`.
    bos_id: the template's `bos_token`; None if the model has none.
    adds_bos: a prompt without a template begins with bos_id.
    """

    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    adds_bos: bool = False


@dataclass(frozen=True, slots=True)
class Frames:
    """The token ids that a tokenizer puts around texts, such as bos and eos.

    prefix, suffix: before and after a text.
    pair: before, between and after two texts.
    """

    prefix: list[int]
    suffix: list[int]
    pair: list[list[int]]


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
        """Convert token ids to text at once; the result is the same as that of `incremental`.
        Raises TextError if an id is outside [0, vocab_size)."""
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
        """Return a detokenizer, which converts the ids of one choice to text as they arrive.
        `keep`: texts whose special tokens are not skipped. `continues`: keep a leading space, since
        a prompt precedes."""
        skip = self._hidden_ids(keep) if skip_special_tokens else frozenset()
        return IncrementalDetokenizer(self._token_bytes, skip, continues)

    def _hidden_ids(self, keep: frozenset[str]) -> frozenset[int]:
        """Return the ids of the special tokens to skip: those that occur in no text of `keep`.
        Cached by `keep`, since parsers use only a few sets of texts."""
        ids = self._skipped.get(keep)
        if ids is None:
            pieces = ((i, self.token_piece(i)) for i in self._special_ids)
            ids = self._skipped[keep] = frozenset(
                i for i, piece in pieces if not (piece and any(piece in text for text in keep))
            )
        return ids

    def check_ids(self, ids: Sequence[int]) -> None:
        """Check token ids. Raises TextError if one is outside [0, vocab_size)."""
        size = self.model_info.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            invalid_id = next(token for token in ids if not 0 <= token < size)
            raise TextError(f"token id {invalid_id} is outside the vocabulary of {size} tokens")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may begin or end inside a character."""
        return self._token_bytes.bytes_of(token)

    def token_piece(self, token: int) -> str:
        """Return a token as tokenizer.json writes it, e.g. "Ġhello" for " hello"; "" for an unknown
        id."""
        return self._token_bytes.piece_of(token)

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself; a part of a character becomes U+FFFD."""
        return self._token_bytes.bytes_of(token).decode("utf-8", "replace")


class StoredTokens:
    """The texts of all tokens of a vocabulary in one buffer; calling it with an id returns the
    token's text, "" if it has none."""

    def __init__(self, sizes: bytes, text: bytes) -> None:
        """`sizes`: the byte length of each token in order of ids, as native unsigned 32-bit
        integers. `text`: all tokens concatenated in UTF-8."""
        self._ends = array("Q", accumulate(memoryview(sizes).cast("I"), initial=0))
        self._text = text

    def __call__(self, token: int) -> str:
        if not 0 <= token < len(self._ends) - 1:
            return ""
        return self._text[self._ends[token] : self._ends[token + 1]].decode()


def store_tokens(tokens: Sequence[str | None]) -> tuple[bytes, bytes]:
    """Encode the texts of all tokens as the arguments `sizes` and `text` of StoredTokens. Raises
    UnsupportedTokenizer if a token has more than MAX_TOKEN_CHARS characters."""
    longest = max((len(token or "") for token in tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise UnsupportedTokenizer(
            f"tokenizer.json has a token of {longest} characters; the limit is {MAX_TOKEN_CHARS}"
        )
    encoded = [(token or "").encode() for token in tokens]
    return array("I", map(len, encoded)).tobytes(), b"".join(encoded)


def stored_vocabulary(
    model_info: TextModelInfo,
    decoder: Mapping[str, Any],
    special_ids: Sequence[int],
    tokens: StoredTokens,
) -> Vocabulary:
    """Build a Vocabulary from data that a tokenizer worker sent. `decoder`: the state of the
    tokenizer's decoder (detokenizer.py). Raises UnsupportedTokenizer if the decoder is not
    supported."""
    return Vocabulary(model_info, TokenBytes(tokens, decoder), frozenset(special_ids))
