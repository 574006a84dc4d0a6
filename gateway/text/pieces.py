"""Maps tokens to bytes; a text is the UTF-8 decoding of its tokens' joined bytes.

The mapping is read from the tokenizer's decoder once and cached by token, so decoding makes no call
per token into the tokenizers library.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.gateway.text.errors import UnsupportedTokenizer

MAX_STEPS = 16  # of a decoder; known models have up to 5
MAX_REWRITE = 64  # characters in the replacement of a decoder step
MAX_TOKEN_CHARS = 4096  # of one token, both in tokenizer.json and decoded
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character that byte-level BPE uses (GPT-2, 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class Pieces:
    """Bytes of single tokens, and the number of spaces to strip at the start of a text.

    strip: maximum number of spaces to strip, because the encoding added them.
    strip_within_first: strip spaces of the first token only.
    """

    def __init__(self, token: Callable[[int], str | None], decoder: Mapping[str, Any]) -> None:
        """Initialize with `token`, which returns a token as tokenizer.json writes it, and
        `decoder`, the decoder's state.

        Raises UnsupportedTokenizer if the decoder does not map single tokens to bytes.
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
                        "a decoder step in tokenizer.json inserts a text that is too long"
                    )
                self._rewrites.append(lambda piece: piece.replace(old, new))
            case "Strip" if step["content"] == " " and not step["stop"]:
                self.strip = step["start"]
            case "Metaspace":
                mark = step["replacement"]
                self._rewrites.append(lambda piece: piece.replace(mark, " "))
                if step["prepend_scheme"] != "never":
                    self.strip, self.strip_within_first = 1 << 30, True
            case kind:
                raise UnsupportedTokenizer(
                    f"tokenizer.json uses the decoder {kind!r}, which is not supported"
                )

    def piece_of(self, token: int) -> str:
        """Return a token as tokenizer.json writes it; "" for an unknown id."""
        return self._token(token) or ""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for an unknown id."""
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
