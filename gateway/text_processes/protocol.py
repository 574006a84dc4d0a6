"""What the gateway and a text process say to each other.

A message is a JSON object, then pieces of bytes:

    4   bytes of the JSON object, little-endian
    ... the JSON object; "sizes" are those of the pieces that follow
"""

import json
import signal
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from pdserve.gateway.text.errors import TextError
from pdserve.services.host.errors import MAX_QUOTED, cut

FORK = b"f"  # to the process of a model: comes with the socket of a new child
# How a child ends that passes a limit of time; no handler is set, so the kernel kills it.
RENDER_SIGNAL = signal.SIGPROF
PROMPT_SIGNAL = signal.SIGVTALRM  # for a grammar, too
LATE_SIGNAL = signal.SIGALRM

MAX_HEAD_BYTES = 16 << 20
MAX_PARTS = 16
MAX_BYTES = 256 << 20  # of all pieces; a vocabulary of a million tokens has some 20 MB
ID_BYTES = 4
_SIZE = struct.Struct("<I")
SIZE_BYTES = _SIZE.size


class TextMessage(NamedTuple):
    head: Mapping[str, Any]
    parts: Sequence[bytes] = ()


def pack(message: TextMessage) -> bytes:
    head = {**message.head, "sizes": [len(part) for part in message.parts]}
    # A client's text may hold lone surrogates; whoever reads it says so.
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    return b"".join((_SIZE.pack(len(data)), data, *message.parts))


def size_of(data: bytes) -> int:
    """Bytes of the JSON object that follows these SIZE_BYTES."""
    return int(_SIZE.unpack(data)[0])


def head_of(data: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no JSON object."""
    head = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(head, dict):
        raise ValueError("a head that is no object")
    return head


def part_sizes(head: Mapping[str, Any]) -> list[int]:
    """Of the pieces behind a head. Raises ValueError if it does not say so, or if it is much."""
    sizes = head.get("sizes")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("a head without the sizes of its pieces")
    if len(sizes) > MAX_PARTS or sum(sizes) > MAX_BYTES:
        raise ValueError(f"{len(sizes)} pieces of {sum(sizes)} bytes")
    return sizes


class MessageReader:
    """Makes messages of the bytes that arrive."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: dict[str, Any] | None = None  # of the message that arrives
        self._sizes: list[int] = []  # of its pieces

    @property
    def num_unread(self) -> int:
        """Bytes of a message that is not whole yet."""
        return len(self._data)

    def feed(self, data: bytes) -> list[TextMessage]:
        """The messages that are whole with these bytes. Raises ValueError or RecursionError if the
        bytes are no message, or one that is too large."""
        self._data += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> TextMessage | None:
        if self._head is None:
            if len(self._data) < SIZE_BYTES:
                return None
            size = size_of(bytes(self._data[:SIZE_BYTES]))
            if size > MAX_HEAD_BYTES:
                raise ValueError(f"a head of {size} bytes")
            if len(self._data) < SIZE_BYTES + size:
                return None
            head = head_of(self._take(SIZE_BYTES + size)[SIZE_BYTES:])
            self._head, self._sizes = head, part_sizes(head)
        if len(self._data) < sum(self._sizes):
            return None
        message = TextMessage(self._head, [self._take(size) for size in self._sizes])
        self._head = None
        return message

    def _take(self, size: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken


def subject(asked: "TextMessage") -> str:
    """What a message asks to be prepared, as errors name it."""
    return "grammar" if asked.head["op"] == "grammar" else "prompt"


def answered(answer: "TextMessage", max_bytes: int) -> bytes:
    """The one piece of an answer. Raises TextError with what a text process says is wrong with what
    it was asked, ValueError for an answer that is none."""
    if "error" in answer.head:
        texts = [answer.head["error"], answer.head.get("param", "")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("an error that is no text")
        raise TextError(*(cut(text, MAX_QUOTED) for text in texts))
    if len(answer.parts) != 1:
        raise ValueError(f"an answer of {len(answer.parts)} pieces")
    if len(answer.parts[0]) > max_bytes:
        raise ValueError(f"an answer of {len(answer.parts[0])} bytes")
    return answer.parts[0]


def with_ids(sequences: Sequence[Sequence[int]]) -> TextMessage:
    """An answer of sequences of token ids."""
    ids = array("I", chain.from_iterable(sequences))
    return TextMessage({"lengths": list(map(len, sequences))}, [ids.tobytes()])


def ids_of(answer: TextMessage, count: int, max_len: int) -> list[list[int]]:
    """`count` sequences of at most `max_len` token ids in all. Raises as `answered` does."""
    piece = answered(answer, max_len * ID_BYTES)
    lengths = answer.head.get("lengths")
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ValueError("an answer without the lengths of its sequences")
    if len(lengths) != count or sum(lengths) * ID_BYTES != len(piece):
        raise ValueError("an answer without ids")
    ids = iter(memoryview(piece).cast("I"))
    return [list(islice(ids, length)) for length in lengths]


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What the files of a model may use. Bytes are beyond what the process had before."""

    load_s: float  # by the clock
    load_bytes: int
    render_s: float  # of processor time, for a chat template
    prompt_s: float  # of processor time, for tokenizing
    prompt_bytes: int  # for a grammar, too
    late_s: float  # by the clock, for a prompt or a grammar in all
    grammar_s: float  # of processor time, for a grammar
