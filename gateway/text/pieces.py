"""How a tokenizer's tokens spell bytes; a text is the UTF-8 of its tokens' bytes joined.

Read from the tokenizer's decoder once, so that decoding needs no call per token into the
tokenizers library and no second look at tokens that were decoded before.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.gateway.text.errors import UnsupportedTokenizer

MAX_STEPS = 16  # of a decoder; known models have up to 5
MAX_REWRITE = 64  # characters that a decoder may write for what it replaces
MAX_TOKEN_CHARS = 4096  # of one token, as tokenizer.json writes it and as it is spelled
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2, 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class Pieces:
    """Bytes of single tokens, and what a text loses at its very start.

    strip: spaces that a text loses at its start, because its encoding put them there.
    strip_within_first: only the first token's, however many.
    """

    def __init__(self, token: Callable[[int], str | None], decoder: Mapping[str, Any]) -> None:
        """`token` gives a token as tokenizer.json writes it; `decoder` is the state of its decoder.
        Raises UnsupportedTokenizer for one that does not spell bytes token by token."""
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
                f"tokenizer.json has a decoder of {len(steps)} steps, more than {MAX_STEPS}"
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
                    raise UnsupportedTokenizer("tokenizer.json has a decoder that writes too much")
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
                    f"tokenizer.json has a decoder {kind!r} that is not known"
                )

    def piece_of(self, token: int) -> str:
        """One token as tokenizer.json writes it; empty for an id that it does not know."""
        return self._token(token) or ""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token; none for an id that the tokenizer does not know."""
        found = self._cache.get(token)
        if found is None:
            found = self._cache[token] = self._spell(self.piece_of(token))
        return found

    def _spell(self, piece: str) -> bytes:
        for rewrite in self._rewrites:
            piece = rewrite(piece)[:MAX_TOKEN_CHARS]  # only a hostile decoder writes so much
        if self._byte_fallback and (match := _BYTE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        if self._byte_level is not None:
            try:
                return bytes(self._byte_level[char] for char in piece)
            except KeyError:
                pass  # an added token, written as it is
        return piece.encode()
