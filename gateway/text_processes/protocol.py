"""What the gateway and a text process say to each other.

A message is a JSON object, then pieces of bytes:

    4   bytes of the JSON object, little-endian
    ... the JSON object; "sizes" are those of the pieces that follow
"""

import json
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

FORK = b"f"  # to the process of a model: comes with the socket of a new child
# How a child ends that passes a limit of time; no handler is set, so the kernel kills it.
RENDER_SIGNAL = signal.SIGPROF
PROMPT_SIGNAL = signal.SIGVTALRM
LATE_SIGNAL = signal.SIGALRM

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
    return dict(json.loads(data.decode("utf-8", "surrogatepass")))


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What the files of a model may use. Bytes are beyond what the process had before."""

    load_s: float  # by the clock
    load_bytes: int
    render_s: float  # of processor time, for a chat template
    prompt_s: float  # of processor time, for tokenizing
    prompt_bytes: int
    late_s: float  # by the clock, for a prompt in all
