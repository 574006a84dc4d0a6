"""Converts text to token ids and back, for one model.

Invariant: text from a client never becomes a special token, except with `parse_special`. In a
prompt that a chat template rendered, only text that the template wrote does. A tokenizer does not
change once built, so threads may share it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import tokenizers

from pdserve.text.errors import TextError, UnsupportedTokenizer
from pdserve.text.template_text import CLIENT, LAST
from pdserve.text.tokenizer.detokenizer import TokenBytes
from pdserve.text.tokenizer.vocabulary import Frames, TextModelInfo, Vocabulary

MAX_SPECIAL_CHARS = 1024  # of one special token; known ones have at most about 40
_FIRST = b'"prepend_scheme":"first"'
Step = TypeVar("Step", tokenizers.normalizers.Normalizer, tokenizers.pre_tokenizers.PreTokenizer)


class SpecialTokens:
    """The special tokens of a tokenizer, and a search for their texts. Tokens of one character are
    never found in a text."""

    def __init__(self, added: Mapping[int, tokenizers.AddedToken]) -> None:
        """`added`: the tokenizer's added tokens by id; those not flagged as special are ignored.
        Raises UnsupportedTokenizer if a special token has more than MAX_SPECIAL_CHARS
        characters."""
        self.ids = frozenset(i for i, token in added.items() if token.special)
        self.texts = {added[i].content: i for i in self.ids if len(added[i].content) > 1}
        self._lstrip = {i for i in self.ids if added[i].lstrip}
        self._rstrip = {i for i in self.ids if added[i].rstrip}
        lengths: dict[str, set[int]] = {}
        for text in self.texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        longest = max(map(len, self.texts), default=0)
        if longest > MAX_SPECIAL_CHARS:
            raise UnsupportedTokenizer(
                f"tokenizer.json has a special token of {longest} characters; "
                f"the limit is {MAX_SPECIAL_CHARS}"
            )

    def split(self, text: str, origin: str | None = None) -> list[str | int]:
        """Split a text into plain texts and ids of special tokens, in order.

        The leftmost special token wins, and of those at the same position the longest. `origin`
        marks who wrote each character (text/template_text.py): a special token then counts only if
        the template wrote all of it.
        """
        parts: list[str | int] = []
        start = 0
        source = text if origin is None else origin
        for position, length in self._matches(source):
            span = source[position : position + length]
            if position < start or (origin is not None and (CLIENT in span or LAST in span)):
                continue
            token = self.texts[span]
            plain = text[start:position]
            parts.append(plain.rstrip() if token in self._lstrip else plain)
            parts.append(token)
            start = position + length
            while token in self._rstrip and text[start : start + 1].isspace():
                start += 1
        parts.append(text[start:])
        return [part for part in parts if part != ""] if parts != [""] else []

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Return (position, length) of the longest special token at each position where one begins,
        in order."""
        matches = []
        for first, lengths in self._lengths.items():
            position = text.find(first)
            while position >= 0:
                length = next(
                    (n for n in lengths if text[position : position + n] in self.texts), 0
                )
                if length:
                    matches.append((position, length))
                position = text.find(first, position + 1)
        return sorted(matches)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt that a chat template rendered; `origin` marks which characters the template wrote
    and which the client (text/template_text.py)."""

    text: str
    origin: str


class Tokenizer(Vocabulary):
    """The tokenizer of a model, from its tokenizer.json. This class separates special tokens from
    plain text; the tokenizers library encodes the plain text between them."""

    def __init__(self, tokenizer_json: bytes, model_info: TextModelInfo) -> None:
        """Load tokenizer.json. Raises UnsupportedTokenizer if it is invalid or uses unsupported
        features."""
        try:
            self._first = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedTokenizer(f"tokenizer.json: {error}") from None
        self._first.no_truncation()
        self._first.no_padding()
        if self._first.decoder is None:
            raise UnsupportedTokenizer("tokenizer.json has no decoder, which converts ids to text")
        self.file = tokenizer_json
        self.added = self._first.get_added_tokens_decoder()
        self.special = SpecialTokens(self.added)
        self.decoder = json.loads(self._first.decoder.__getstate__())
        token_bytes = TokenBytes(self._first.id_to_token, self.decoder)
        super().__init__(model_info, token_bytes, self.special.ids)
        prefix, suffix = self._frame("a")
        self.frames = Frames(prefix, suffix, self._frame("a", "a"))
        self._first.encode_special_tokens = True  # encode the text of special tokens as plain text
        self._within = _without_prefix(self._first)  # for text that continues other text
        # A Metaspace of scheme "first" adds its space before the first text only, a normalizer
        # before every text between special tokens.
        prefixes_every_part = _normalizers(self._first) != _normalizers(self._within)
        self._rest = self._first if prefixes_every_part else self._within

    def _frame(self, text: str, second: str | None = None) -> list[list[int]]:
        """Return the ids that the tokenizer puts before and after a text, or before, between and
        after two."""
        framed = self._first.encode(text, second)
        gaps: list[list[int]] = []
        end = 0
        for number in range(1 if second is None else 2):
            own = [i for i, sequence in enumerate(framed.sequence_ids) if sequence == number]
            start = own[0] if own else len(framed.ids)  # the vocabulary may lack the text
            gaps.append(framed.ids[end:start])
            end = own[-1] + 1 if own else start
        gaps.append(framed.ids[end:])
        if self.model_info.adds_bos and self.model_info.bos_id is not None and not gaps[0]:
            gaps[0] = [self.model_info.bos_id]
        return gaps

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Convert a text to token ids. With `parse_special`, the texts of special tokens become
        these tokens; otherwise they are plain text.

        `add_special_tokens` adds the ids that the model expects around a text, such as bos; a bos
        that the text already has is not repeated. Raises TextError if the text is not valid Unicode
        (it has a lone surrogate).
        """
        parts = self.special.split(text) if parse_special else [text]
        return self._framed(self._encode(parts), add_special_tokens)

    def encode_rendered(self, rendered: Rendered, *, add_special_tokens: bool = False) -> list[int]:
        """Convert a prompt from a chat template to token ids. No bos is added by default, since
        templates usually write it."""
        parts = self.special.split(rendered.text, rendered.origin)
        return self._framed(self._encode(parts), add_special_tokens)

    def encode_within(self, text: str) -> list[int]:
        """Convert a text that follows other text to token ids: no space is added before it, and
        texts of special tokens become these tokens. Raises TextError if the text is not valid
        Unicode."""
        ids: list[int] = []
        for part in self.special.split(text):
            ids += [part] if isinstance(part, int) else self._plain(part, self._within)
        return ids

    def _framed(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        if not add_special_tokens:
            return ids
        prefix = self.frames.prefix
        if ids[: len(prefix)] == prefix:
            prefix = []
        return [*prefix, *ids, *self.frames.suffix]

    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._plain(part, self._rest if index else self._first)
        return ids

    def _plain(self, text: str, pipeline: tokenizers.Tokenizer) -> list[int]:
        """Encode a text without special tokens, and prevent the model's merges from producing
        one."""
        try:  # the batch call releases the interpreter lock; `encode` holds it
            ids = list(pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except (TypeError, UnicodeEncodeError):
            raise TextError("the text is not valid Unicode: it has a lone surrogate") from None
        if self.special.ids.isdisjoint(ids):
            return ids
        (encoding,) = pipeline.encode_batch([text], add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self.special.texts.get(text[start:end]) == token:
                head = self._plain(text[: start + 1], pipeline)
                return head + self._plain(text[start + 1 :], self._within)
        return ids  # the special token is the model's unknown token

    def token_name(self, token: int | None) -> str | None:
        """Return a token as tokenizer.json writes it; None for an unknown id or if `token` is
        None."""
        return None if token is None else self._first.id_to_token(token)


def _normalizers(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the steps of the tokenizer's normalizer as tokenizer.json writes them."""
    if tokenizer.normalizer is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.normalizer.__getstate__())
    steps: list[dict[str, Any]] = state["normalizers"] if state["type"] == "Sequence" else [state]
    return steps


def _without_prefix(first: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a variant of the tokenizer that does not add a space before a text.

    It shares the model and its vocabulary; if `first` adds no space, it is `first` itself. Raises
    UnsupportedTokenizer if the added tokens would get other ids in the variant.
    """
    steps = _normalizers(first)
    remaining = [step for step in steps if step["type"] != "Prepend"]
    state = first.pre_tokenizer.__getstate__() if first.pre_tokenizer else b""
    if remaining == steps and _FIRST not in state:
        return first
    tokenizer = tokenizers.Tokenizer(first.model)
    if remaining:
        tokenizer.normalizer = _restored(
            tokenizers.normalizers.Sequence([]), {"type": "Sequence", "normalizers": remaining}
        )
    if first.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = first.pre_tokenizer
    if _FIRST in state:
        metaspace = json.loads(state.replace(_FIRST, b'"prepend_scheme":"never"'))
        tokenizer.pre_tokenizer = _restored(tokenizers.pre_tokenizers.Metaspace(), metaspace)
    added = sorted(first.get_added_tokens_decoder().items())
    # The order of the calls determines the ids. Few calls, since each scans all added tokens.
    for special, group in groupby((token for _, token in added), lambda token: bool(token.special)):
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(list(group))
    for token_id, token in added:
        if tokenizer.token_to_id(token.content) != token_id:
            raise UnsupportedTokenizer(
                f"tokenizer.json gives {token.content!r} the id {token_id}, but the tokenizers "
                f"library assigns the id {tokenizer.token_to_id(token.content)}"
            )
    tokenizer.encode_special_tokens = True
    return tokenizer


def _restored(step: Step, state: dict[str, Any]) -> Step:
    """Set the state of a normalizer or pre-tokenizer step and return the step."""
    step.__setstate__(json.dumps(state).encode())
    return step
