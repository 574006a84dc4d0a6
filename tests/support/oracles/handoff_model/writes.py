"""Writes into decode's blocks, and whether they are allowed."""

from oracles.handoff_model.memory import BLOCK_SIZE, SPEC
from oracles.handoff_model.rules import Violation
from oracles.handoff_model.state import World
from pdserve.engine.handoff.protocol import Bitmap, FrameHeader

Frame = tuple[int, int]  # which block of the prompt, and its value


def bitmap_of(w: World, a: int) -> Bitmap:
    it = w.attempt(a)
    return w.model.bitmap(w.model.request_of(a), it.first, it.bitmap)


def header(index: int) -> FrameHeader:
    """Return the header of the frame with one block, the only field that matters here."""
    tokens = range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
    size = SPEC.groups[0].block_bytes(BLOCK_SIZE)
    return FrameHeader(b"", 0, 0, 0, range(1), tokens, range(1), size, b"")


def without(frames: tuple[Frame, ...], frame: Frame) -> tuple[Frame, ...]:
    at = frames.index(frame)
    return frames[:at] + frames[at + 1 :]


def check_values(w: World, a: int, table: tuple[int, ...], does: str) -> None:
    expected = w.model.values.of_request[w.model.request_of(a)]
    found = tuple(w.decode.values[block - 1] for block in table)
    if found != expected:
        raise Violation(f"a request {does} on keys and values {found}, not {expected}")


def copy_blocks(w: World, copies: tuple[tuple[int, int], ...]) -> None:
    for source, target in copies:
        put(w, target, w.decode.values[source - 1])


def put(w: World, block: int, value: int) -> None:
    values = list(w.decode.values)
    values[block - 1] = value
    w.decode.values = tuple(values)
