"""The whole of kernels/cuda/copy_hash.cu on the host: barriers, the last block, tag and verdict."""

import ctypes
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from fakes.cuda import FENCES, copy_hash_on_host
from oracles.copy_hash import tag_of

from pdserve.kernels.copy_hash import KEY_BYTES, TAG_BYTES, TILE_BYTES, UNIT_BYTES, expand_key
from pdserve.kernels.cuda import INTACT, SHARE_BYTES, SHARES_AT

DAMAGED = 2
KEY = bytes(range(1, KEY_BYTES + 1))


@dataclass
class Launch:
    """One slot with the buffers of its launches."""

    pool: Any  # uint8 [layers, blocks, block_bytes]
    layers: range
    blocks: list[int]

    def __post_init__(self) -> None:
        self.num_bytes = len(self.layers) * len(self.blocks) * self.pool.shape[2]
        self.tiles = -(-self.num_bytes // TILE_BYTES)
        self.slot = np.zeros(self.num_bytes + TAG_BYTES, np.uint8)
        self.shares = np.zeros(SHARES_AT + self.tiles * SHARE_BYTES, np.uint8)
        self.verdict = np.zeros(1, np.uint32)
        self.rng = Random(self.num_bytes)

    def run(self, to_slot: bool, key: bytes = KEY) -> None:
        """Run the thread blocks in a random order, and the threads of a block in one of two
        orders."""
        plan = np.frombuffer(
            expand_key(key).tobytes() + np.array(self.blocks, np.int32).tobytes(), np.uint8
        )
        order = self.rng.sample(range(self.tiles), self.tiles)
        slot = int(self.slot.ctypes.data)
        copy_hash_on_host()(
            (ctypes.c_uint32 * self.tiles)(*order),
            self.tiles,
            self.rng.randrange(2),
            sum(FENCES),
            int(self.pool.ctypes.data),
            self.pool.shape[1] * self.pool.shape[2],
            self.pool.shape[2],
            self.layers[0],
            len(self.blocks),
            slot,
            self.num_bytes // UNIT_BYTES,
            int(to_slot),
            int(plan.ctypes.data),
            int(self.shares.ctypes.data),
            slot + self.num_bytes,
            int(self.verdict.ctypes.data),
        )

    @property
    def payload(self) -> Any:
        return self.pool[self.layers.start : self.layers.stop][:, self.blocks].reshape(-1)


@pytest.mark.parametrize(
    ("block_bytes", "layers", "blocks"),
    [
        (16, range(1), [0]),
        (48, range(7), [4, 1, 3]),
        (4096, range(2, 4), [5, 0, 2]),
        (TILE_BYTES, range(2), [3, 4]),
        (TILE_BYTES + 16, range(1, 4), [0, 2]),
    ],
)
def test_copies_to_the_slot_and_back(block_bytes: int, layers: range, blocks: list[int]) -> None:
    rng = np.random.default_rng(block_bytes)
    launch = Launch(rng.integers(0, 256, (8, 6, block_bytes), dtype=np.uint8), layers, blocks)
    expected = launch.payload.copy()
    for number in range(3):  # each launch leaves its scratch unchanged
        key = bytes([number]) * KEY_BYTES
        launch.run(True, key)
        assert (launch.slot[: launch.num_bytes] == expected).all()
        tag = tuple(int(word) for word in launch.slot[launch.num_bytes :].view("<u8"))
        assert tag == tag_of(expected.tobytes(), key)
        assert not launch.verdict[0]
    launch.pool[:] = 0
    launch.run(False, key)
    assert launch.verdict[0] == INTACT
    assert (launch.payload == expected).all()
    launch.pool[launch.layers.start : launch.layers.stop, blocks] = 0
    assert not launch.pool.any(), "no other block was written"


def test_a_changed_byte_is_reported_as_damage() -> None:
    rng = np.random.default_rng(2)
    launch = Launch(rng.integers(0, 256, (1, 3, TILE_BYTES), dtype=np.uint8), range(1), [1, 2])
    launch.run(True)
    for at in (0, TILE_BYTES + 7, launch.num_bytes - 1, launch.num_bytes + 3):
        launch.slot[at] ^= 1
        launch.verdict[0] = 0
        launch.run(False)
        assert launch.verdict[0] == DAMAGED
        launch.slot[at] ^= 1
    launch.run(False)
    assert launch.verdict[0] == INTACT
