"""Division of prompts into frames, and the receiver's bitmap."""

import random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pdserve.engine.handoff.protocol import Bitmap, FrameError, FrameHeader, Piece, cut, slot_bytes
from pdserve.engine.handoff.protocol.frames import SLOT_BYTES
from pdserve.engine.kv import KvSpec, LayerGroup

FULL = LayerGroup(tuple(range(0, 30, 2)), "full", 0, 3, 64, "float32", 0, 3)
WINDOW = LayerGroup(tuple(range(1, 30, 2)), "window", 48, 3, 64, "float32", 0, 3)
SPEC = KvSpec(32, (FULL, WINDOW))


def header(piece: Piece, **change: object) -> FrameHeader:
    group = SPEC.groups[piece.group]
    fields: dict[str, object] = {
        "ticket": b"t" * 16,
        "sequence": 1,
        "slot": 0,
        "group": piece.group,
        "layers": piece.layers,
        "tokens": range(piece.blocks.start * 32, piece.blocks.stop * 32),
        "heads": range(3),
        "payload_bytes": len(piece.layers) * len(piece.blocks) * group.block_bytes(32),
        "payload_tag": b"x" * 16,
    }
    return FrameHeader(**(fields | change))  # type: ignore[arg-type]


def first_in_window(num_tokens: int) -> int:
    """Return the first block of WINDOW that the row at position num_tokens sees."""
    return max(0, num_tokens - WINDOW.window + 1) // 32


@given(
    num_tokens=st.integers(1, 3000),
    first=st.integers(0, 60),
    limit=st.sampled_from([1, 100_000, SLOT_BYTES]),
    seed=st.integers(),
)
def test_pieces_cover_every_cell_once(num_tokens: int, first: int, limit: int, seed: int) -> None:
    end = -(-num_tokens // 32)
    firsts = (min(first, end), max(min(first, end), first_in_window(num_tokens)))
    bitmap = Bitmap(SPEC, num_tokens, firsts)
    pieces = [p for g in (0, 1) for p in cut(SPEC, g, range(firsts[g], end), limit)]
    random.Random(seed).shuffle(pieces)
    assert bitmap.complete == (not pieces)
    for i, piece in enumerate(pieces):
        assert not bitmap.complete
        parsed = bitmap.piece(header(piece))
        assert parsed == piece
        assert not bitmap.has(piece)
        bitmap.add(piece)
        bitmap.add(pieces[i // 2])  # a duplicate
        assert bitmap.has(piece)
    assert bitmap.complete


@given(
    num_tokens=st.integers(1, 400),
    first=st.integers(0, 8),
    limit=st.sampled_from([1, 100_000, SLOT_BYTES]),
    seed=st.integers(),
)
def test_leading_blocks_are_complete_in_every_layer(
    num_tokens: int, first: int, limit: int, seed: int
) -> None:
    end = -(-num_tokens // 32)
    firsts = (min(first, end), max(min(first, end), first_in_window(num_tokens)))
    bitmap = Bitmap(SPEC, num_tokens, firsts)
    pieces = [p for g in (0, 1) for p in cut(SPEC, g, range(firsts[g], end), limit)]
    random.Random(seed).shuffle(pieces)
    missing = {(p.group, n, b) for p in pieces for n in p.layers for b in p.blocks}
    for piece in pieces:
        lacking = min(block for _, _, block in missing)
        event(f"a gap behind what is there: {any(b != lacking for *_, b in missing)}")
        assert bitmap.num_leading == lacking
        bitmap.add(piece)
        missing -= {(piece.group, n, b) for n in piece.layers for b in piece.blocks}
    assert not missing
    assert bitmap.num_leading == end


def test_frames_are_large_where_the_prompt_allows() -> None:
    pieces = list(cut(SPEC, 0, range(2), slot_bytes(SPEC)))
    sizes = [len(p.layers) * len(p.blocks) * FULL.block_bytes(32) for p in pieces]
    assert sum(sizes) == 15 * 2 * FULL.block_bytes(32)
    assert all(512 << 10 <= size <= SLOT_BYTES for size in sizes[:-1])


def test_a_block_larger_than_a_slot_increases_the_slot_size() -> None:
    spec = KvSpec(1024, (LayerGroup((0,), "full", 0, 8, 128, "float32", 0, 8),))
    assert slot_bytes(spec) == spec.groups[0].block_bytes(1024) > SLOT_BYTES


def test_frames_that_do_not_fit_are_refused(subtests: pytest.Subtests) -> None:
    for change in (
        {"group": 2},
        {"tokens": range(32, 100)},
        {"tokens": range(64)},  # block 0 is a shared prefix block, which was not requested
        {"tokens": range(64, 192)},  # past the end
        {"layers": range(14, 16)},
        {"heads": range(2)},
        {"payload_bytes": 17},
    ):
        with subtests.test(change=change):
            bitmap = Bitmap(SPEC, 100, (1, 1))
            good = header(Piece(0, range(2), range(1, 3)))
            assert bitmap.piece(good)
            with pytest.raises(FrameError):
                bitmap.piece(header(Piece(0, range(2), range(1, 3)), **change))


def test_missing_data_are_counted_in_blocks() -> None:
    spec = KvSpec(4, (LayerGroup((0, 1, 2, 3), "full", 0, 1, 4, "float32", 0, 1),))
    bitmap = Bitmap(spec, 20, [1])
    assert bitmap.missing_blocks == 4
    bitmap.add(Piece(0, range(2), range(1, 3)))
    assert bitmap.missing_blocks == 3
    bitmap.add(Piece(0, range(2, 4), range(1, 5)))
    assert bitmap.missing_blocks == 1
