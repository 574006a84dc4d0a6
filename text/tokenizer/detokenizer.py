"""Converts a stream of token ids to text, by the bytes of each token.

The rules that map tokens to bytes are read once from the decoder in tokenizer.json, and the bytes
are cached by token, so the tokenizers library is not called for each token.

Invariant: the pieces of text that `push` and `flush` return, joined, are the text of all ids,
however the ids are split into calls. No piece ends inside a character; the bytes of an unfinished
character are held back.
"""

import codecs
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pdserve.text.errors import UnsupportedTokenizer

MAX_STEPS = 16  # of a decoder; known models have up to 5
MAX_REWRITE = 64  # characters in the replacement of a decoder step
MAX_TOKEN_CHARS = 4096  # of one token, both in tokenizer.json and decoded
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Before these a cleaning WordPiece decoder puts no space.
_JOINED = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each printable character by which byte-level BPE writes bytes (GPT-2,
    2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """The bytes of single tokens, and the rule for spaces at the start of a text.

    strip: maximum number of spaces to remove at the start of a text, because encoding added them.
    strip_within_first: remove spaces of the first token only.
    """

    def __init__(self, token: Callable[[int], str | None], decoder: Mapping[str, Any]) -> None:
        """`token` returns a token as tokenizer.json writes it, or None for an unknown id; `decoder`
        is the state of the tokenizer's decoder.

        Raises UnsupportedTokenizer if the decoder does not map each token to bytes independently.
        """
        self._token = token
        self._cache: dict[int, bytes] = {}
        self._byte_level: dict[str, int] | None = None
        self._byte_fallback = False
        self._rewrites: list[Callable[[str], str]] = []
        self.strip = 0
        self.strip_within_first = False
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        if len(steps) > MAX_STEPS:
            raise UnsupportedTokenizer(
                f"the decoder in tokenizer.json has {len(steps)} steps; the limit is {MAX_STEPS}"
            )
        for step in steps:
            self._add(step)

    def _add(self, step: Mapping[str, Any]) -> None:
        match step["type"]:
            case "ByteLevel":
                self._byte_level = byte_alphabet()
            case "ByteFallback":
                self._byte_fallback = True
            case "Fuse":
                pass
            case "Replace" if "String" in step["pattern"]:
                old, new = step["pattern"]["String"], step["content"]
                if len(new) > MAX_REWRITE:
                    raise UnsupportedTokenizer(
                        f"a decoder step in tokenizer.json inserts {len(new)} characters; "
                        f"the limit is {MAX_REWRITE}"
                    )
                self._rewrites.append(lambda piece: piece.replace(old, new))
            case "Strip" if step["content"] == " " and not step["stop"]:
                self.strip = step["start"]
            case "Metaspace":
                mark = step["replacement"]
                self._rewrites.append(lambda piece: piece.replace(mark, " "))
                if step["prepend_scheme"] != "never":
                    self.strip, self.strip_within_first = 1 << 30, True
            case "WordPiece":
                self._rewrites.append(_word_piece(step["prefix"], step["cleanup"]))
                self.strip = 1
            case kind:
                raise UnsupportedTokenizer(
                    f"tokenizer.json uses the decoder {kind!r}, which is not supported"
                )

    def piece_of(self, token: int) -> str:
        """Return a token as tokenizer.json writes it; "" for an unknown id."""
        return self._token(token) or ""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; b"" for an unknown id."""
        data = self._cache.get(token)
        if data is None:
            data = self._cache[token] = self._spell(self.piece_of(token))
        return data

    def _spell(self, piece: str) -> bytes:
        for rewrite in self._rewrites:
            piece = rewrite(piece)[:MAX_TOKEN_CHARS]  # only a hostile decoder exceeds this
        if self._byte_fallback and (match := _BYTE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        if self._byte_level is not None:
            try:
                return bytes(self._byte_level[char] for char in piece)
            except KeyError:
                pass  # an added token, in plain text
        return piece.encode()


def _word_piece(prefix: str, cleans: bool) -> Callable[[str], str]:
    """Return the text of a WordPiece token: a token without `prefix` begins a word, with a space
    before it unless `cleans` and the token is a sign or ending."""

    def text(piece: str) -> str:
        if piece.startswith(prefix):
            return piece.removeprefix(prefix)
        return piece if cleans and piece.startswith(_JOINED) else f" {piece}"

    return text


class IncrementalDetokenizer:
    """Converts the token ids of one choice to text as they arrive, in constant time per token;
    holds back only the bytes of an unfinished character.

    Invalid bytes become U+FFFD, one per maximal part of an ill-formed sequence (Unicode 15, section
    3.9), as soon as they are known to be invalid.
    """

    def __init__(
        self, token_bytes: TokenBytes, skip: Collection[int] = (), continues: bool = False
    ) -> None:
        """`skip`: ids of tokens to leave out, such as special tokens. `continues`: keep leading
        spaces, because other text precedes."""
        self._token_bytes = token_bytes
        self._skip = skip
        self._strip = 0 if continues else token_bytes.strip
        self._is_partial = False  # the decoder holds bytes of an unfinished character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add token ids and return the text that is now certain; it may be empty."""
        parts = []
        for token in ids:
            if token not in self._skip:
                part = self._token_bytes.bytes_of(token)
                parts.append(self._stripped(part) if self._strip else part)
        data = b"".join(parts)
        if not self._is_partial:
            try:
                return data.decode()
            except UnicodeDecodeError:
                self._is_partial = True  # or the bytes are invalid; the decoder decides
        text = self._decoder.decode(data)
        self._is_partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """End the text: return U+FFFD if an unfinished character is held back, else ""."""
        return self._decoder.decode(b"", True)

    def _stripped(self, data: bytes) -> bytes:
        spaces = min(len(data) - len(data.lstrip(b" ")), self._strip)
        at_start = spaces == len(data) and not self._token_bytes.strip_within_first
        self._strip = self._strip - spaces if at_start else 0
        return data[spaces:]
