"""The copy with hash copies the right bytes, and its tag is the documented polynomial.

The GPU source is compiled for the host, and the kernel that uses it for GPUs.
"""

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles.copy_hash import tag_of
from systems.nvcc import nvcc

from pdserve.kernels import _native
from pdserve.kernels.copy_hash import KEY_BYTES, PRIME, TILE_BYTES, expand_key
from pdserve.kernels.cuda import copy_hash as launcher

FOLDER = launcher.FOLDER
KEY = bytes(range(100, 100 + KEY_BYTES))


def copy(
    pool: NDArray[np.uint8],  # [layers, blocks, block bytes]
    layers: range,
    blocks: list[int],
    slot: NDArray[np.uint8],
    key: bytes = KEY,
    to_slot: bool = True,
) -> tuple[int, int]:
    return _native.copy_and_hash(
        pool.reshape(-1),
        pool.shape[1] * pool.shape[2],
        pool.shape[2],
        layers.start,
        len(layers),
        np.array(blocks, np.int32),
        slot,
        expand_key(key),
        to_slot,
    )


def test_copies_blocks_in_order_and_computes_the_polynomial_tag(subtests: pytest.Subtests) -> None:
    for block_bytes, layers, blocks in (
        (16, range(1), [0]),
        (16, range(1, 3), [4, 1, 3]),  # many blocks per step of a thread
        (48, range(7), list(range(5))),
        (4096, range(2), [1, 3]),  # one block per step of a thread
        (24_576, range(1, 4), [5, 0, 2]),
        (TILE_BYTES, range(2), [3, 4, 5]),
        (TILE_BYTES + 16, range(2), [0, 2]),
    ):
        with subtests.test(block_bytes=block_bytes, layers=layers, blocks=blocks):
            rng = np.random.default_rng(block_bytes)
            pool = rng.integers(0, 256, (8, 6, block_bytes), dtype=np.uint8)
            expected = pool[layers.start : layers.stop][:, blocks].reshape(-1)
            slot = np.zeros(expected.size, np.uint8)
            tag = copy(pool, layers, blocks, slot)
            assert (slot == expected).all()
            assert tag == tag_of(expected.tobytes(), KEY)
            back = np.zeros_like(pool)
            assert copy(back, layers, blocks, slot, to_slot=False) == tag
            assert (back[layers.start : layers.stop][:, blocks].reshape(-1) == expected).all()
            back[layers.start : layers.stop, blocks] = 0
            assert not back.any(), "no other block was written"


def test_extreme_words_and_keys() -> None:
    for fill in (0, 255):
        data = np.full((1, 1, 2 * TILE_BYTES + 32), fill, np.uint8)
        slot = np.zeros(data.size, np.uint8)
        for key in (bytes(32), b"\xff" * 32, (PRIME - 1).to_bytes(8, "little") * 4):
            assert copy(data, range(1), [0], slot, key) == tag_of(data.tobytes(), key)


def test_zeros_of_different_lengths_have_different_tags() -> None:
    tags = set()
    for size in (16, 32, 48, TILE_BYTES, TILE_BYTES + 16):
        pool = np.zeros((1, 1, size), np.uint8)
        tags.add(copy(pool, range(1), [0], np.zeros(size, np.uint8)))
    assert len(tags) == 5


def test_every_byte_of_the_key_changes_the_tag() -> None:
    pool = np.random.default_rng(3).integers(0, 256, (1, 1, 4096), dtype=np.uint8)
    slot = np.zeros(4096, np.uint8)
    first = copy(pool, range(1), [0], slot)
    for at in range(KEY_BYTES):
        if at % 8 == 7:
            continue  # the top byte is reduced modulo 2^61 - 1: seven of its bits fold onto others
        changed = bytearray(KEY)
        changed[at] ^= 1
        other = copy(pool, range(1), [0], slot, bytes(changed))
        lane = at // 16
        assert other[lane] != first[lane]
        assert other[1 - lane] == first[1 - lane], "the lanes are independent"


def test_single_bit_flips_are_detected() -> None:
    """Flips one bit of 512 bytes 100,000 times; each lane alone detects it."""
    rng = random.Random(5)
    data = np.frombuffer(rng.randbytes(512), np.uint8).copy().reshape(1, 1, 512)
    slot = np.zeros(512, np.uint8)
    words = expand_key(KEY)
    blocks = np.zeros(1, np.int32)
    flat = data.reshape(-1)

    def tag() -> tuple[int, int]:
        return _native.copy_and_hash(flat, 512, 512, 0, 1, blocks, slot, words, True)

    good, found = tag(), 0
    for _ in range(100_000):
        at, bit = rng.randrange(512), 1 << rng.randrange(8)
        flat[at] ^= bit
        bad = tag()
        found += bad[0] != good[0] and bad[1] != good[1]
        flat[at] ^= bit
    assert found == 100_000
    assert tag() == good


def test_arguments_that_do_not_fit_are_refused() -> None:
    pool, slot = np.zeros((2, 3, 32), np.uint8), np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="outside the pool"):
        copy(pool, range(1, 2), [3], slot)
    with pytest.raises(ValueError, match="outside the pool"):
        copy(pool, range(1, 2), [-1], slot)
    with pytest.raises(ValueError, match="too small"):
        copy(pool, range(2), [0, 1], slot)
    with pytest.raises(ValueError, match="units of 16"):
        copy(np.zeros((1, 1, 24), np.uint8), range(1), [0], slot)
    with pytest.raises(ValueError, match="32 bytes"):
        expand_key(b"short")


DRIVER = """
#include <cstdio>
#include <cstring>
#include <vector>
#include "copy_hash.h"
int main() {
  using namespace copy_hash;
  Lane lanes[kLanes];
  unsigned size;
  if (fread(lanes, sizeof lanes, 1, stdin) != 1 || fread(&size, 4, 1, stdin) != 1) return 1;
  std::vector<unsigned char> pool(size), slot(size);
  if (fread(pool.data(), 1, size, stdin) != size) return 1;
  int block = 0;
  Pages pages{pool.data(), size, size, 0, 1, &block};
  u32 units = size / kUnitBytes;
  u64 sums[kLanes] = {};
  for (u32 tile = 0; tile * kTileUnits < units; ++tile) {
    u64 of_tile[kLanes] = {}, shares[kLanes];
    for (u32 thread = 0; thread < kThreads; ++thread) {
      copy_part(pages, slot.data(), units, true, tile, thread, lanes, shares);
      for (int i = 0; i < kLanes; ++i) of_tile[i] = add(of_tile[i], shares[i]);
    }
    for (int i = 0; i < kLanes; ++i) sums[i] = add(sums[i], tile_share(lanes[i], of_tile[i], tile));
  }
  if (memcmp(pool.data(), slot.data(), size)) return 2;
  printf("%llu %llu\\n", finish(lanes[0], sums[0], size), finish(lanes[1], sums[1], size));
}
"""


@pytest.mark.parametrize("compiler", ["c++", "nvcc"])
def test_the_header_gives_the_same_tag_with_every_compiler(compiler: str, tmp_path: Path) -> None:
    (tmp_path / "driver.cu").write_text(DRIVER)
    if compiler == "nvcc":
        words = [*nvcc(), "-x", "cu"]
    else:
        words = [os.environ.get("CXX", "c++"), "-x", "c++"]
    command = [*words, "-std=c++17", "-O1", f"-I{FOLDER}", "driver.cu", "-o", "driver"]
    build(command, tmp_path)
    rng = np.random.default_rng(11)
    for size in (16, 4096, TILE_BYTES + 4080, 3 * TILE_BYTES):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        given = expand_key(KEY).tobytes() + size.to_bytes(4, "little") + data.tobytes()
        done = subprocess.run([tmp_path / "driver"], input=given, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found = tuple(int(word) for word in done.stdout.split())
        slot = np.zeros(size, np.uint8)
        assert found == copy(data.reshape(1, 1, size), range(1), [0], slot)
        assert found == tag_of(data.tobytes(), KEY)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernel_compiles(arch: str, tmp_path: Path) -> None:
    options = [option for option in launcher.OPTIONS if option.startswith("-")]
    command = [*nvcc(), *options, f"-arch={arch}", "-cubin", "-Werror", "all-warnings"]
    build([*command, "-o", str(tmp_path / "out.cubin"), str(FOLDER / "copy_hash.cu")], tmp_path)
    assert b"copy_hash_kernel" in (tmp_path / "out.cubin").read_bytes()


def test_python_and_the_kernel_agree_on_their_layout() -> None:
    source = (FOLDER / "copy_hash.cu").read_text() + (FOLDER / "copy_hash.h").read_text()
    assert f"kThreads = {launcher.THREADS};" in source
    assert f"kIntact = {launcher.INTACT}," in source
    units: Any = TILE_BYTES // 16 // launcher.THREADS
    assert f"kUnitsPerThread = {units};" in source
    assert len(expand_key(KEY)) == 2 * 7, "struct Lane"


def build(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
