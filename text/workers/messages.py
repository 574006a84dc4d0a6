"""The format of the messages between the gateway and a tokenizer worker or a fork server.

A message is a JSON object (its head), followed by byte strings (its parts):

    4   size of the JSON object in bytes, little-endian
    ... the JSON object; "sizes" lists the sizes of the parts that follow
"""

import json
import signal
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from pdserve.services.common.errors import MAX_QUOTED, cut
from pdserve.text.errors import TextError, TooLong

FORK = b"f"  # to the fork server of a model, with the socket of a new worker
# Signals that end a worker which exceeds a time limit; without a handler, the kernel kills it.
RENDER_SIGNAL = signal.SIGPROF
PROMPT_SIGNAL = signal.SIGVTALRM  # also for a grammar
LATE_SIGNAL = signal.SIGALRM

MAX_HEAD_BYTES = 16 << 20
MAX_PARTS = 16
MAX_BYTES = 256 << 20  # of all parts; a vocabulary of a million tokens has about 20 MB
ID_BYTES = 4
_SIZE = struct.Struct("<I")
SIZE_BYTES = _SIZE.size


class WorkerMessage(NamedTuple):
    head: Mapping[str, Any]
    parts: Sequence[bytes] = ()


def pack(message: WorkerMessage) -> bytes:
    head = {**message.head, "sizes": [len(part) for part in message.parts]}
    # A client's text may hold lone surrogates; the receiver rejects them.
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    return b"".join((_SIZE.pack(len(data)), data, *message.parts))


def size_of(data: bytes) -> int:
    """Decode the first SIZE_BYTES of a message: the size of its head in bytes."""
    return int(_SIZE.unpack(data)[0])


def head_of(data: bytes) -> dict[str, Any]:
    """Decode the head of a message. Raises ValueError if it is not a JSON object."""
    head = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(head, dict):
        raise ValueError("the head of the message is not a JSON object")
    return head


def part_sizes(head: Mapping[str, Any]) -> list[int]:
    """Return the sizes of a message's parts in bytes, as its head lists them. Raises ValueError if
    they are missing, or if the parts exceed MAX_PARTS or MAX_BYTES."""
    sizes = head.get("sizes")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("the head of the message lacks the sizes of its parts")
    if len(sizes) > MAX_PARTS or sum(sizes) > MAX_BYTES:
        raise ValueError(
            f"the message has {len(sizes)} parts of {sum(sizes)} bytes in total; "
            f"the limits are {MAX_PARTS} and {MAX_BYTES}"
        )
    return sizes


class MessageReader:
    """Assembles messages from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: dict[str, Any] | None = None  # of the incomplete message
        self._sizes: list[int] = []  # of its parts

    @property
    def num_unread(self) -> int:
        """Number of buffered bytes of a message that is not complete yet."""
        return len(self._data)

    def feed(self, data: bytes) -> list[WorkerMessage]:
        """Add received bytes and return the messages that are complete with them. Raises ValueError
        or RecursionError if the bytes are not a message or the message is too large."""
        self._data += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> WorkerMessage | None:
        if self._head is None:
            if len(self._data) < SIZE_BYTES:
                return None
            size = size_of(bytes(self._data[:SIZE_BYTES]))
            if size > MAX_HEAD_BYTES:
                raise ValueError(
                    f"the head of the message has {size} bytes; the limit is {MAX_HEAD_BYTES}"
                )
            if len(self._data) < SIZE_BYTES + size:
                return None
            head = head_of(self._take(SIZE_BYTES + size)[SIZE_BYTES:])
            self._head, self._sizes = head, part_sizes(head)
        if len(self._data) < sum(self._sizes):
            return None
        message = WorkerMessage(self._head, [self._take(size) for size in self._sizes])
        self._head = None
        return message

    def _take(self, size: int) -> bytes:
        data = bytes(self._data[:size])
        del self._data[:size]
        return data


def subject(message: WorkerMessage) -> str:
    """Return what a message is about, "prompt" or "grammar", for error texts."""
    return "grammar" if message.head["op"] == "grammar" else "prompt"


def result_of(answer: WorkerMessage, max_bytes: int) -> bytes:
    """Return the one part of a worker's answer. Raises TextError if the answer reports an error,
    ValueError if the answer is malformed or its part has more than `max_bytes`."""
    if "error" in answer.head:
        texts = [answer.head["error"], answer.head.get("param", "")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("the error text in the answer is not a string")
        if "num_tokens" in answer.head:
            num_tokens = answer.head["num_tokens"]
            if type(num_tokens) is not int or num_tokens < 1:
                raise ValueError("the number of tokens in the answer is not a positive integer")
            raise TooLong(cut(texts[0], MAX_QUOTED), num_tokens)
        raise TextError(*(cut(text, MAX_QUOTED) for text in texts))
    if len(answer.parts) != 1:
        raise ValueError(f"the answer has {len(answer.parts)} parts instead of one")
    if len(answer.parts[0]) > max_bytes:
        raise ValueError(f"the answer has {len(answer.parts[0])} bytes; the limit is {max_bytes}")
    return answer.parts[0]


def with_ids(sequences: Sequence[Sequence[int]]) -> WorkerMessage:
    """Build an answer that contains sequences of token ids."""
    ids = array("I", chain.from_iterable(sequences))
    return WorkerMessage({"lengths": list(map(len, sequences))}, [ids.tobytes()])


def ids_of(answer: WorkerMessage, count: int, max_len: int) -> list[list[int]]:
    """Decode an answer's `count` sequences of token ids, which may have at most `max_len` ids
    together.

    Raises TextError if the answer reports an error, ValueError if it is malformed or has too many
    ids.
    """
    piece = result_of(answer, max_len * ID_BYTES)
    lengths = answer.head.get("lengths")
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ValueError("the answer lacks the lengths of its sequences")
    if len(lengths) != count or sum(lengths) * ID_BYTES != len(piece):
        raise ValueError("the answer has too few or too many sequences or token ids")
    ids = iter(memoryview(piece).cast("I"))
    return [list(islice(ids, length)) for length in lengths]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of loading a model's files (`load_*`) and of each piece of work with them. Limits in
    bytes count what is allocated beyond the memory already in use; those in seconds are noted
    below."""

    load_s: float  # wall time
    load_bytes: int
    render_s: float  # CPU time, for a chat template
    prompt_s: float  # CPU time, for tokenizing
    prompt_bytes: int  # also for a grammar
    late_s: float  # wall time, for a whole prompt or grammar
    grammar_s: float  # CPU time, for a grammar
