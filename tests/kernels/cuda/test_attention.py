"""Paged attention in Triton, interpreted: it agrees with the reference, and a token's result has
the same bits in every possible step. Slots without a key of the row hold NaN or infinity.

More random cases: ATTENTION_CASES=500, or `random_case(seed)` and `error(case)` from a script.
"""

import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from builders.attention_rows import plan_rows
from fakes import triton_interpreter  # noqa: F401
from torch import Tensor

from pdserve.kernels import reference
from pdserve.kernels.cuda.attention import paged as attention
from pdserve.kernels.cuda.attention import paged_attention

pytestmark = pytest.mark.kernels

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MOST_ERROR = {F32: 1e-5, BF16: 1e-2, F16: 2e-3}
NUM_CASES = int(os.environ.get("ATTENTION_CASES", "10"))


@dataclass(frozen=True)
class Case:
    """Rows are pairs (new tokens, all keys); decode rows come first."""

    rows: tuple[tuple[int, int], ...] = ((1, 70), (1, 5), (9, 40))
    num_decode_rows: int = 2
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    latent: int = 0
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype | None = None  # dtype of the queries
    seed: int = 0

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(sum(new for new, _ in self.rows[:row]) for row in range(len(self.rows) + 1))

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(total for _, total in self.rows)


@dataclass(frozen=True)
class Step:
    """Inputs of attention for a case's rows."""

    case: Case
    q: Tensor
    kv: Tensor
    block_table: Tensor
    sinks: Tensor | None

    @property
    def scale(self) -> float:
        return self.case.head_dim**-0.5

    def expected(self) -> Tensor:
        case = self.case
        rows = self.block_table.long(), case.starts, case.kv_lens, case.num_decode_rows
        out = reference.paged_attention(
            self.q, self.kv, *rows, self.scale, case.window, case.soft_cap, self.sinks
        )
        return out[:, :, -case.latent :]

    def attend(self, max_kv_len: int = 0) -> Tensor:
        case = self.case
        rows = plan_rows(
            case.starts, case.kv_lens, case.num_decode_rows, self.block_table, max_kv_len
        )
        return paged_attention(
            self.q,
            self.kv,
            rows,
            self.scale,
            case.window,
            case.soft_cap,
            self.sinks,
            case.latent,
        )


def sequence(case: Case, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, H, D], keys and values [T, K, D] of row `row`. They do not depend on how
    many tokens are new."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + row)
    heads = case.kv_heads * case.group, case.kv_heads, case.kv_heads
    return tuple(  # type: ignore[return-value]
        torch.randn(1000, n, case.head_dim, generator=generator)[: case.rows[row][1]].to(case.dtype)
        for n in heads
    )


def step(case: Case, which: tuple[int, ...] = ()) -> Step:
    """Return the inputs of one step. `which` lists the sequences of the rows; if empty, row i has
    sequence i."""
    size, planes = case.block_size, 1 if case.latent else 2
    columns = [-(-total // size) for total in case.kv_lens]
    blocks = list(range(1, sum(columns) + 1))
    random.Random(case.seed).shuffle(blocks)
    shape = (len(blocks) + 1, planes, case.kv_heads, size, case.head_dim)
    kv = torch.full(shape, math.nan, dtype=case.kv_dtype or case.dtype)
    kv[::2] = math.inf
    table = torch.zeros(len(case.rows), max(columns) + 1, dtype=torch.int32)
    queries = []
    for row, (new, total) in enumerate(case.rows):
        q, k, v = sequence(replace(case, rows=((new, total),) * 100), which[row] if which else row)
        own = torch.tensor([blocks.pop() for _ in range(columns[row])])
        table[row, : len(own)] = own
        position = torch.arange(total)
        slots = own[position // size] * size + position % size
        reference.write_kv(kv, k, None if case.latent else v, slots)
        if case.window:  # other rows may own blocks that no new token sees
            gone = max(0, total - new - case.window + 1) // size
            kv[own[:gone]] = math.nan
            table[row, :gone] = 0
        queries.append(q[total - new :])
    sinks = torch.linspace(-2, 3, case.kv_heads * case.group) if case.sinks else None
    return Step(case, torch.cat(queries), kv, table, sinks)


def error(case: Case) -> float:
    """Return the norm of the difference from the reference, relative to the reference's norm."""
    made = step(case)
    got, expected = made.attend(), made.expected()
    assert got.dtype == case.dtype
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).norm() / expected.double().norm())


ODD = {
    "one key": Case(((1, 1), (1, 1)), 2),
    "a chunk of all": Case(((33, 33),), 0, group=3),
    "chunks only, of one token, too": Case(((1, 65), (2, 66), (70, 70)), 0, group=1),
    "longer than a split": Case(((1, 600), (1, 513), (3, 515)), 2, kv_heads=1, group=1),
    "a split to the key": Case(((1, 512), (1, 64)), 2, kv_heads=1),
    "groups of 7, heads of 80": Case(group=7, head_dim=80, kv_heads=1),
    "groups of 16, heads of 96": Case(group=16, head_dim=96, kv_heads=1),
    "groups of 20, one by one": Case(((1, 70), (1, 30)), 2, group=20, kv_heads=1),
    "one head": Case(group=1, kv_heads=1, head_dim=128),
    "heads of 16": Case(head_dim=16),
    "heads of 192, blocks of 8": Case(head_dim=192, kv_heads=1, block_size=8),
    "heads of 256, blocks of 128": Case(head_dim=256, kv_heads=1, block_size=128, soft_cap=3.0),
    "blocks of 48": Case(block_size=48, group=3),
    "a window of one": Case(window=1, sinks=True),
    "a window": Case(((1, 300), (1, 20), (50, 200)), 2, window=37, sinks=True, kv_heads=1),
    "a window over splits": Case(((1, 700), (1, 530)), 2, kv_heads=1, window=150),
    "a soft cap": Case(soft_cap=1.5, sinks=True, group=8, kv_heads=1),
    "latent": Case(head_dim=96, latent=64, kv_heads=1, group=16),
    "latent, all of it": Case(head_dim=80, latent=80, kv_heads=1, group=3),
    "DeepSeek": Case(((1, 66), (2, 20)), 1, head_dim=576, latent=512, kv_heads=1, group=4),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ODD)
def test_odd_shapes(name: str, dtype: torch.dtype) -> None:
    assert error(replace(ODD[name], dtype=dtype)) <= MOST_ERROR[dtype]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(BF16, F16), (BF16, F32), (F32, BF16), (F16, F16), (F16, BF16)], ids=str
)
def test_keys_and_values_of_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    assert error(Case(dtype=dtype, kv_dtype=kv_dtype)) <= MOST_ERROR[dtype]


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    rows = [(1, draw.choice((1, 5, 63, 64, 65, 100, 130))) for _ in range(draw.randint(0, 3))]
    num_decode_rows = len(rows)
    for _ in range(draw.randint(0 if rows else 1, 2)):
        new = draw.choice((1, 2, 15, 40))
        rows.append((new, new + draw.choice((0, 1, 30, 64, 90))))
    latent = draw.choice((0, 0, 0, 16, 64))
    return Case(
        tuple(rows),
        num_decode_rows,
        kv_heads=draw.randint(1, 2),
        group=draw.choice((1, 2, 3, 4, 7, 8, 16)),
        head_dim=latent + draw.choice((0, 16, 32)) if latent else 16 * draw.randint(1, 9),
        block_size=draw.choice((8, 16, 32, 48, 64, 128)),
        window=draw.choice((0, 0, 1, 2, 17, 64, 100)),
        soft_cap=draw.choice((0.0, 0.0, 1.5)),
        sinks=draw.random() < 0.5,
        latent=latent,
        dtype=draw.choice((F32, BF16)),
        kv_dtype=draw.choice((None, None, F16, BF16, F32)),
        seed=seed,
    )


@pytest.fixture
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 64)
    monkeypatch.setattr(attention, "LATENT_SPLIT", 64)


@pytest.mark.parametrize("seed", range(NUM_CASES))
@pytest.mark.usefixtures("_short_splits")
def test_random_cases(seed: int) -> None:
    case = random_case(seed)
    assert error(case) <= MOST_ERROR[case.dtype], case


@pytest.mark.parametrize("seed", range(NUM_CASES))
@pytest.mark.usefixtures("_short_splits")
def test_random_rows_have_the_same_bits_alone(seed: int) -> None:
    """The last token of a row has the same bits in its step, alone as a decode row, and in a chunk
    of another length."""
    case = replace(random_case(seed), seed=seed)
    draw = random.Random(seed)
    row = draw.randrange(len(case.rows))
    total = case.rows[row][1]
    found = step(case).attend(max_kv_len=draw.choice((0, 300)))[case.starts[row + 1] - 1]
    alone = step(replace(case, rows=((1, total),), num_decode_rows=1), (row,)).attend()
    assert torch.equal(alone[0], found), case
    new = draw.randint(1, total)
    chunk = step(replace(case, rows=((new, total),), num_decode_rows=0), (row,)).attend()
    assert torch.equal(chunk[-1], found), case


VARIANTS = {
    "plain": Case(kv_heads=1, group=3),
    "window": Case(kv_heads=1, group=2, window=70, head_dim=80),
    "soft cap and sinks": Case(kv_heads=2, group=1, soft_cap=1.5, sinks=True),
    "all": Case(kv_heads=1, group=7, window=65, soft_cap=2.0, sinks=True, head_dim=32),
    "latent": Case(kv_heads=1, group=8, head_dim=48, latent=32),
    "float16 values": Case(kv_heads=1, group=2, kv_dtype=F16, head_dim=32),
    "float32": Case(kv_heads=1, group=2, window=65, sinks=True, head_dim=32, dtype=F32),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.usefixtures("_short_splits")
def test_a_token_has_the_same_bits_in_every_step(name: str) -> None:
    case = replace(VARIANTS[name], dtype=F32 if name == "float32" else BF16)
    total = 140
    chunk = step(replace(case, rows=((total, total),), num_decode_rows=0)).attend()
    for new in (1, 7, 32):
        again = step(replace(case, rows=((new, total),), num_decode_rows=0)).attend()
        assert torch.equal(again, chunk[-new:])
    alone = step(replace(case, rows=((1, total),), num_decode_rows=1)).attend()
    assert torch.equal(alone, chunk[-1:])
    for others in (1, 4, 16):
        rows = tuple((1, 3 + 5 * other) for other in range(others))
        at = others // 2
        batch = replace(
            case, rows=(*rows[:at], (1, total), *rows[at:], (3, 20)), num_decode_rows=others + 1
        )
        which = (*range(1, at + 1), 0, *range(at + 1, others + 2))
        assert torch.equal(step(batch, which).attend(max_kv_len=300)[at], alone[0])


@pytest.mark.usefixtures("_short_splits")
def test_rows_of_one_split_do_not_depend_on_the_number_of_splits() -> None:
    """The number of splits is a property of the step, not of the row."""
    made = step(Case(((1, 60), (1, 33)), 2, sinks=True, dtype=BF16))
    assert torch.equal(made.attend(), made.attend(max_kv_len=65))


ROOT = Path(__file__).parents[3]
REDUCTIONS = """
import re, sys
sys.path[:0] = sys.argv[1:]
import triton
from compile_only import compile_only
from kernel_launches import attention

run = triton.JITFunction.run
found = []

def noted(self, *args, **kwargs):
    kernel = run(self, *args, **kwargs)
    code = kernel.asm["ttgir"]
    named = dict(re.findall(r"^(#[a-z0-9]+) = (.*)$", code, re.M))
    if kernel.name != "merge_kernel":
        for tile, name in re.findall(r"tensor<([0-9]+)x[0-9]+xf32, (#[a-z0-9]+)>\\) ->", code):
            layout = re.sub(r"instrShape = \\[16, [0-9]+, 16\\]", "", named[name])
            found.append((kernel.name, kernel.metadata.num_warps, tile, layout))
    return kernel

triton.JITFunction.run = noted
for arch in (80, 90):
    with compile_only(arch):
        for label, launch in attention():
            if label.endswith("bfloat16 over bfloat16, heads of 128, groups of 2"):
                launch()
    kernels, *layouts = zip(*found)
    assert set(kernels) == {"attend_kernel", "split_kernel"}
    assert len(set(zip(*layouts))) == 1, found
    found.clear()
"""


def test_compiled_kernels_reduce_over_keys_in_the_same_order() -> None:
    """The order depends on how a tile's keys are distributed over threads, which the interpreter
    does not model."""
    folders = [ROOT / "tests/support", ROOT / "tools/tables"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", REDUCTIONS, *map(str, folders)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_queries_may_be_a_view_of_wider_rows() -> None:
    made = step(Case())
    wide = torch.full((len(made.q), 8, 64), math.nan)
    wide[:, :4] = made.q
    assert torch.equal(replace(made, q=wide[:, :4]).attend(), made.attend())


def test_a_row_without_keys_gives_zero() -> None:
    made = step(Case(((1, 30), (1, 30)), 2, sinks=True))
    for max_kv_len in (0, 600):
        rows = plan_rows((0, 1, 2), (30, 0), 2, made.block_table, max_kv_len)
        out = paged_attention(made.q, made.kv, rows, 0.1, sinks=made.sinks)
        assert not out[1].any()
        assert out[0].all()


def test_a_nan_query_gives_nan() -> None:
    made = step(Case(((1, 30), (1, 30), (5, 9)), 2))
    plain = made.attend()
    made.q[0] = made.q[4] = math.nan
    out = made.attend()
    assert out[[0, 4]].isnan().all()
    keep = [1, 2, 3, 5, 6]
    assert torch.equal(out[keep], plain[keep])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"q": torch.zeros(3, 5, 64)}, "kv"),
        ({"q": torch.zeros(3, 4, 80)}, "head_dim"),
        ({"q": torch.zeros(4, 3, 64).transpose(0, 1)}, "q"),
        ({"kv": torch.zeros(2, 2, 16, 2, 64).transpose(2, 3)}, "kv"),
        ({"latent": 32}, "kv"),
        ({"kv": torch.zeros(2, 1, 2, 16, 64), "latent": 20}, "latent"),
        ({"q": torch.zeros(3, 4, 528), "kv": torch.zeros(2, 2, 2, 16, 528)}, "head_dim"),
        ({"scale": 0.0}, "scale"),
        ({"rows": plan_rows((0, 1), (1,), 1, torch.zeros(2, 2).int().t())}, "block_table"),
    ],
)
def test_inputs_that_do_not_fit_are_named_in_the_error(
    change: dict[str, object], field: str
) -> None:
    rows = plan_rows((0, 1, 2, 3), (1, 1, 1), 3, torch.zeros(3, 1).int())
    arguments = {
        "q": torch.zeros(3, 4, 64),
        "kv": torch.zeros(2, 2, 2, 16, 64),
        "rows": rows,
        "scale": 0.1,
    }
    with pytest.raises(ValueError, match=f"^{field}: "):
        paged_attention(**{**arguments, **change})  # type: ignore[arg-type]
