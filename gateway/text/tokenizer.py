"""Text to token ids and back, for one model.

Text that a client wrote never becomes a special token: only `parse_special` and the parts of a
rendered prompt that its template wrote do. Immutable once built, so threads may share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from pdserve.gateway.text.detokenizer import IncrementalDetokenizer
from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.pieces import Pieces
from pdserve.gateway.text.special import SpecialTokens

_FIRST = b'"prepend_scheme":"first"'


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


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt made by a chat template.

    `marked` holds `mark` inside every special token's text that a client wrote (special.py).
    """

    marked: str
    mark: str

    @property
    def text(self) -> str:
        """The prompt as a person reads it."""
        return self.marked.replace(self.mark, "")


class Tokenizer:
    """A tokenizer.json with the ids that matter to a server.

    Special tokens are split off here, and the library encodes what lies between as plain text.
    """

    def __init__(self, tokenizer_json: bytes, card: TextCard) -> None:
        """Raises UnsupportedTokenizer if the file cannot be read or used."""
        try:
            self._first = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedTokenizer(f"tokenizer.json: {error}") from None
        self.card = card
        self._first.no_truncation()
        self._first.no_padding()
        self._pieces = Pieces(self._first)
        self.special = SpecialTokens(self._first.get_added_tokens_decoder())
        self._prefix, self._suffix = self._frame()
        self._first.encode_special_tokens = True  # special tokens' text is text
        self._rest = _continuing(self._first)

    def _frame(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after a text."""
        framed = self._first.encode("a", add_special_tokens=True)
        added = framed.special_tokens_mask
        text = [index for index, mask in enumerate(added) if not mask] or [len(added)]
        prefix, suffix = framed.ids[: text[0]], framed.ids[text[-1] + 1 :]
        if self.card.adds_bos and self.card.bos_id is not None and not prefix:
            prefix = [self.card.bos_id]
        return prefix, suffix

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Ids of a text; with `parse_special`, special tokens' text in it becomes their ids.

        `add_special_tokens` puts bos (and what else the model wants) around it, but never a second
        bos. Raises TextError for text that is not Unicode (lone surrogates).
        """
        parts = self.special.split(text) if parse_special else [text]
        return self._framed(self._encode(parts), add_special_tokens)

    def encode_rendered(self, rendered: Rendered, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a prompt made by a template; as a rule the template writes bos itself."""
        parts = self.special.split(rendered.marked)
        plain = [p.replace(rendered.mark, "") if isinstance(p, str) else p for p in parts]
        return self._framed(self._encode(plain), add_special_tokens)

    def _framed(self, ids: list[int], wanted: bool) -> list[int]:
        if not wanted:
            return ids
        before = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        return [*before, *ids, *self._suffix]

    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._plain(part, self._rest if index else self._first)
        return ids

    def _plain(self, text: str, pipeline: tokenizers.Tokenizer) -> list[int]:
        """Ids of plain text, with no special token even where the model's own merges make one."""
        try:  # by batch: that releases the interpreter lock, which `encode` holds all along
            ids = list(pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except (TypeError, UnicodeEncodeError):
            raise TextError("the text is not valid Unicode: it has a lone surrogate") from None
        if self.special.ids.isdisjoint(ids):
            return ids
        (encoding,) = pipeline.encode_batch([text], add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self.special.texts.get(text[start:end]) == token:
                left = self._plain(text[: start + 1], pipeline)
                return left + self._plain(text[start + 1 :], self._rest)
        return ids  # the special one is the id of what the model cannot write

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; as `incremental` gives it, all at once. Raises as `check_ids` does."""
        self.check_ids(ids)
        detokenizer = self.incremental(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def incremental(
        self, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> IncrementalDetokenizer:
        """A detokenizer for one choice; `continues` keeps a leading space, after a prompt."""
        skip = self.special.ids if skip_special_tokens else frozenset()
        return IncrementalDetokenizer(self._pieces, skip, continues)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises TextError for an id outside [0, vocab_size)."""
        size = self.card.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise TextError(f"token id {wrong} is outside the vocabulary of {size} tokens")

    def token_name(self, token: int | None) -> str | None:
        """A token as tokenizer.json writes it; None if there is none."""
        return None if token is None else self._first.id_to_token(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which need not be whole characters."""
        return self._pieces.bytes_of(token)

    def token_text(self, token: int) -> str:
        """The text of one token by itself; U+FFFD stands for parts of characters."""
        return self._pieces.bytes_of(token).decode("utf-8", "replace")


def _continuing(first: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer for text after a special token: the same unless a space is put before the
    first text only (Metaspace, prepend_scheme "first"); shares the vocabulary."""
    if first.pre_tokenizer is None:
        return first
    state = first.pre_tokenizer.__getstate__()
    if _FIRST not in state:
        return first
    rest = tokenizers.Tokenizer(first.model)
    if first.normalizer is not None:
        rest.normalizer = first.normalizer
    pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    pre_tokenizer.__setstate__(state.replace(_FIRST, b'"prepend_scheme":"never"'))
    rest.pre_tokenizer = pre_tokenizer
    added = first.get_added_tokens_decoder()
    for token_id in sorted(added):
        token = added[token_id]
        (rest.add_special_tokens if token.special else rest.add_tokens)([token])
        if rest.token_to_id(token.content) != token_id:
            raise UnsupportedTokenizer(
                f"tokenizer.json: id {token_id} of {token.content!r} is not its"
            )
    rest.encode_special_tokens = True
    return rest
