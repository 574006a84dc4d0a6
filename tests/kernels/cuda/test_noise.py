"""Noise in Triton equals the reference's bit for bit, interpreted and compiled."""

import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fakes import triton_interpreter  # noqa: F401  (before kernels run)

from pdserve.kernels.cuda.sampling.records import RECORD
from pdserve.kernels.cuda.sampling.samples import (
    LN2,
    SQRT2,
    noise_bits,
    noise_bound,
    noise_key,
    noise_of,
)
from pdserve.kernels.reference.sampling import SERIES, _log, gumbel_at

pytestmark = pytest.mark.kernels


@triton.jit
def draw_noise(records, first, step, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bits = noise_bits(noise_key(records, 0), first + at * step)
    tl.store(out + at, noise_of(bits))


@triton.jit
def noise_and_bound(bits, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    here = tl.load(bits + at).to(tl.uint32, bitcast=True)
    tl.store(out + at, noise_of(here))
    tl.store(out + BLOCK + at, noise_bound(here))


def test_noise_bit_for_bit() -> None:
    """Compares 26 positions of 4,096 ids, which is more than 100,000 draws."""
    rng = np.random.default_rng(0)
    ids = torch.arange(4096) * 37 + 5
    for draw in range(26):
        seed = [0, 1 << 63, (1 << 64) - 1][draw] if draw < 3 else int(rng.integers(1 << 63)) * 2 + 1
        choice, position = int(rng.integers(128)), int(rng.integers(1 << 30))
        record = np.zeros(1, RECORD)
        record["seed"], record["choice"], record["position"] = seed, choice, position
        out = torch.empty(4096)
        draw_noise[(1,)](torch.from_numpy(record.view(np.uint8)), 5, 37, out, BLOCK=4096)
        where = [torch.tensor([x]) for x in (seed - (1 << 64) * (seed >> 63), choice, position)]
        assert torch.equal(out, gumbel_at(where[0], where[1], where[2], ids[None])[0])


def test_noise_of_extreme_bits_is_exact_and_below_its_bound() -> None:
    """Covers all bits near the ends, near powers of two, and where the logarithm's exponent
    changes."""
    root = int(2**31.5)  # there the mantissa of u is near the root of 2
    centres = [0, (1 << 32) - 1, root, root // 2, root // 4, int((1 << 32) / math.e)]
    centres += [1 << i for i in range(1, 32)] + [(1 << 32) - (1 << i) for i in range(1, 31)]
    near = np.arange(-2000, 2001)
    rng = np.random.default_rng(1)
    bits = np.concatenate([*(near + c for c in centres), rng.integers(0, 1 << 32, 1 << 17)])
    bits = np.unique(bits[(bits >= 0) & (bits < 1 << 32)])
    bits = np.resize(bits, 1 << (len(bits) - 1).bit_length())
    out = torch.empty(2, len(bits))
    noise_and_bound[(1,)](
        torch.from_numpy(bits.astype(np.uint32).view(np.int32)), out, BLOCK=len(bits)
    )
    noise, bound = out
    u = (torch.from_numpy(bits).double() + 0.5) * 2.0**-32
    assert torch.equal(noise, (-_log(-_log(u))).float())
    assert bool((bound >= noise).all())
    assert float((bound - noise)[(noise > 3) & (noise < 18)].max()) < 0.085


COMPILE = """
import compile_only, torch
from pdserve.kernels.cuda.sampling import samples
compiled = []
described = compile_only._described
compile_only._described = lambda kernel: compiled.append(kernel) or described(kernel)
with compile_only.compile_only(90):
    logits, bytes_of = torch.zeros(1, 5000), torch.zeros(96, dtype=torch.uint8)
    samples.Survey(bytes_of, logits, logits, 5000, 1).choose(logits)
print(compiled[-1].asm["ptx"])
"""


def test_compiled_noise_is_not_fused_and_has_exact_constants() -> None:
    """The interpreter cannot show this: a plain number in a comparison becomes a float32, and the
    compiler may fuse operations."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(__file__).parents[3] / "tools/tables")
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=True
    )
    ptx = run.stdout
    doubles = {name for name in re.findall(r"\b([a-z]+\.[.a-z]*f64)\b", ptx) if "rn" in name}
    assert {name.split(".")[0] for name in doubles} >= {"add", "mul", "div"}
    assert not re.search(r"\bfma[.a-z]*\.f64\b", ptx)
    assert not re.search(r"\b(add|mul|sub|div)\.f64\b", ptx)  # ptxas may fuse ops without .rn
    for constant in (SQRT2.value, LN2.value, *SERIES[1:], 2.0**-32):
        assert struct.pack(">d", constant).hex().upper() in ptx
