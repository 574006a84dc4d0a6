"""A model's tokens as text: what an answer needs of its tokenizer, without the tokenizer.

Immutable once built, so threads may share it.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pdserve.gateway.text.detokenizer import IncrementalDetokenizer
from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.pieces import MAX_TOKEN_CHARS, Pieces


@dataclass(frozen=True, slots=True)
class TextCard:
    """What must be known of a model beside its tokenizer.json.

    A gateway takes it from the proto ModelCard, `pdserve.LLM` from CardData.

    vocab_size: rows of the model's embedding; may exceed what the tokenizer knows.
    eos_ids: any of them ends a text; the first is the template's `eos_token`.
    bos_id: the template's `bos_token`; None when the model has none.
    adds_bos: a prompt that no template made begins with bos_id.
    """

    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    adds_bos: bool = False


class Vocabulary:
    """Token ids to text, for one model."""

    def __init__(self, card: TextCard, pieces: Pieces, special_ids: frozenset[int]) -> None:
        self.card = card
        self._pieces = pieces
        self._special_ids = special_ids
        self._skipped: dict[frozenset[str], frozenset[int]] = {}  # by the texts that are kept

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; as `incremental` gives it, all at once. Raises as `check_ids` does."""
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
        """A detokenizer for one choice. `keep`: texts of special tokens that are not skipped;
        `continues` keeps a leading space, after a prompt."""
        skip = self._special_but(keep) if skip_special_tokens else frozenset()
        return IncrementalDetokenizer(self._pieces, skip, continues)

    def _special_but(self, keep: frozenset[str]) -> frozenset[int]:
        """The ids of special tokens with other texts. Parsers ask for few sets of them."""
        found = self._skipped.get(keep)
        if found is None:
            kept = {i for i in self._special_ids if keep and self.token_piece(i) in keep}
            found = self._skipped[keep] = self._special_ids - kept
        return found

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises TextError for an id outside [0, vocab_size)."""
        size = self.card.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise TextError(f"token id {wrong} is outside the vocabulary of {size} tokens")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which need not be whole characters."""
        return self._pieces.bytes_of(token)

    def token_piece(self, token: int) -> str:
        """One token as the vocabulary writes it, such as "\u0120hello"; empty if it has none."""
        return self._pieces.piece_of(token)

    def token_text(self, token: int) -> str:
        """The text of one token by itself; U+FFFD stands for parts of characters."""
        return self._pieces.bytes_of(token).decode("utf-8", "replace")


class StoredTokens:
    """The tokens of a vocabulary in one piece of memory, by id; those without a text are empty."""

    def __init__(self, sizes: bytes, text: bytes) -> None:
        """`sizes`: bytes of each token, as unsigned 32-bit integers of this machine; `text`: all
        tokens in UTF-8, one after the other."""
        self._ends = array("Q", accumulate(memoryview(sizes).cast("I"), initial=0))
        self._text = text

    def __call__(self, token: int) -> str:
        if not 0 <= token < len(self._ends) - 1:
            return ""
        return self._text[self._ends[token] : self._ends[token + 1]].decode()


def store(tokens: Sequence[str | None]) -> tuple[bytes, bytes]:
    """The sizes and the text of StoredTokens. Raises UnsupportedTokenizer for a token that is too
    long."""
    longest = max((len(token or "") for token in tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise UnsupportedTokenizer(f"tokenizer.json: a token of {longest} characters")
    encoded = [(token or "").encode() for token in tokens]
    return array("I", map(len, encoded)).tobytes(), b"".join(encoded)


def stored_vocabulary(
    card: TextCard, decoder: Mapping[str, Any], special_ids: Sequence[int], tokens: StoredTokens
) -> Vocabulary:
    """`decoder`: the state of the tokenizer's decoder (pieces.py). Raises UnsupportedTokenizer."""
    return Vocabulary(card, Pieces(tokens, decoder), frozenset(special_ids))
