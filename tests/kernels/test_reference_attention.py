"""paged_attention and write_kv compared with a dense formula in float64; every other slot holds
NaN."""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels import reference
from pdserve.kernels.reference import layers


@dataclass(frozen=True)
class Case:
    """Rows (new tokens, all keys); decode rows come first."""

    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 12
    block_size: int = 4
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    seed: int = 0

    @property
    def num_decode_rows(self) -> int:
        return sum(new == 1 for new, _ in self.rows)

    @property
    def sink_values(self) -> Tensor | None:
        return torch.linspace(-2, 3, self.kv_heads * self.group) if self.sinks else None

    @property
    def starts(self) -> tuple[int, ...]:
        offsets = [0]
        for new, _ in self.rows:
            offsets.append(offsets[-1] + new)
        return tuple(offsets)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lens = st.integers(1, 70)
    rows = [(1, draw(lens)) for _ in range(draw(st.integers(0, 5)))]
    for _ in range(draw(st.integers(0 if rows else 1, 2))):
        new = draw(st.integers(2, 40))
        rows.append((new, new + draw(st.integers(0, 40))))
    return Case(
        tuple(rows),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from((2, 7, 20, 64))),
        block_size=draw(st.sampled_from((1, 3, 8, 32))),
        window=draw(st.sampled_from((0, 0, 1, 2, 9, 33))),
        soft_cap=draw(st.sampled_from((0.0, 0.0, 1.5))),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


@dataclass(frozen=True)
class Filled:
    """A pool with the keys and values of a case in shuffled blocks, and NaN elsewhere."""

    q: Tensor
    kv: Tensor
    block_table: Tensor
    keys: list[Tensor]  # per row [kv_len, K, D]
    values: list[Tensor]


def fill(case: Case, dtype: torch.dtype = torch.float32) -> Filled:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    columns = [-(-total // case.block_size) for _, total in case.rows]
    order = (torch.randperm(sum(columns), generator=generator) + 1).tolist()
    shape = (sum(columns) + 1, 2, case.kv_heads, case.block_size, case.head_dim)
    kv = torch.full(shape, math.nan, dtype=dtype)
    table = torch.zeros(len(case.rows), max(columns), dtype=torch.int64)
    keys, values = [], []
    for row, (new, total) in enumerate(case.rows):
        blocks = [order.pop() for _ in range(columns[row])]
        table[row, : columns[row]] = torch.tensor(blocks)
        keys.append(normal(total, case.kv_heads, case.head_dim))
        values.append(normal(total, case.kv_heads, case.head_dim))
        slots = [blocks[p // case.block_size] * case.block_size + p % case.block_size
                 for p in range(total)]  # fmt: skip
        reference.write_kv(kv, keys[row], values[row], torch.tensor(slots))
        # Other rows may own the blocks that no token of this step can see.
        if case.window:
            gone = max(0, total - new - case.window + 1) // case.block_size
            kv[table[row, :gone]] = math.nan
            table[row, :gone] = 0
    q = normal(case.starts[-1], case.kv_heads * case.group, case.head_dim)
    return Filled(q, kv, table, keys, values)


def attend(case: Case, filled: Filled, scale: float) -> Tensor:
    return reference.paged_attention(
        filled.q,
        filled.kv,
        filled.block_table,
        case.starts,
        tuple(total for _, total in case.rows),
        case.num_decode_rows,
        scale,
        case.window,
        case.soft_cap,
        case.sink_values,
    )


def dense(case: Case, filled: Filled, scale: float) -> Tensor:
    """Return attention computed token by token and head by head in float64."""
    out = torch.empty(filled.q.shape, dtype=torch.float64)
    for row, (new, total) in enumerate(case.rows):
        for i in range(new):
            position = total - new + i
            low = max(0, position - case.window + 1) if case.window else 0
            for head in range(filled.q.shape[1]):
                one = slice(low, position + 1), head // case.group
                scores = (
                    filled.keys[row][one].double() @ filled.q[case.starts[row] + i, head].double()
                )
                scores = scores * scale
                if case.soft_cap:
                    scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
                if case.sink_values is not None:
                    scores = torch.cat((scores, case.sink_values[head : head + 1].double()))
                weights = torch.exp(scores - scores.max())
                weights = weights / weights.sum()
                value = weights[: position + 1 - low] @ filled.values[row][one].double()
                out[case.starts[row] + i, head] = value
    return out


@given(cases())
@settings(max_examples=80)
@example(Case(((1, 1), (1, 3), (1, 200)), block_size=3))  # decode rows fill several buckets
@example(Case(((1, 1), (1, 3), (1, 150)), block_size=3, window=40, soft_cap=2.0))
@example(Case(((290, 310),), kv_heads=1, group=1))  # more than one tile of queries
@example(Case(((1, 1), (1, 150), (290, 310)), window=40, sinks=True))
@example(Case(((1, 9), (290, 310)), kv_heads=1, group=2, window=30))
def test_equals_the_dense_formula(case: Case) -> None:
    filled = fill(case)
    actual = attend(case, filled, 0.3)
    torch.testing.assert_close(actual.double(), dense(case, filled, 0.3), atol=2e-5, rtol=0)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_scores_over_many_keys_take_bounded_memory(
    soft_cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 10 * 6 * 80  # ten queries of six heads over 80 keys
    monkeypatch.setattr("pdserve.kernels.reference.layers.TILE_SCORES", limit)
    sizes: list[int] = []
    whole = layers._attend

    def attend_tile(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        sizes.append(q.shape[:3].numel() * k.shape[2])
        return whole(q, k, *rest)

    monkeypatch.setattr(layers, "_attend", attend_tile)
    case = Case(((45, 80),), soft_cap=soft_cap)
    filled = fill(case)
    actual = attend(case, filled, 0.3)
    torch.testing.assert_close(actual.double(), dense(case, filled, 0.3), atol=2e-5, rtol=0)
    assert len(sizes) == 5
    assert max(sizes) <= limit


@given(cases())
@settings(max_examples=30)
def test_bf16_is_within_its_rounding_error(case: Case) -> None:
    filled = fill(case, torch.bfloat16)
    actual = attend(case, filled, 0.3)
    assert actual.dtype == torch.bfloat16
    # Values have magnitude 1 to 4; weights, scores and the result are each rounded to 8 bits.
    torch.testing.assert_close(actual.double(), dense(case, filled, 0.3), atol=0.06, rtol=0.02)


def test_a_nonfinite_row_does_not_affect_others(subtests: pytest.Subtests) -> None:
    for window, poison in product((0, 6), (math.nan, math.inf, -math.inf, 3e38)):
        with subtests.test(window=window, poison=poison):
            case = Case(((1, 7), (1, 13), (5, 17), (4, 11)), window=window)
            filled = fill(case)
            clean = attend(case, filled, 0.3)
            for broken in (1, 2):
                # Only the row's last token sees the newest key.
                block = filled.block_table[broken, (case.rows[broken][1] - 1) // case.block_size]
                offset = (case.rows[broken][1] - 1) % case.block_size
                kv = filled.kv.clone()
                kv[block, 1, :, offset] = poison
                changed = attend(
                    case, Filled(filled.q, kv, filled.block_table, filled.keys, filled.values), 0.3
                )
                others = torch.ones(len(clean), dtype=torch.bool)
                others[case.starts[broken] : case.starts[broken + 1]] = False
                assert torch.equal(changed[others], clean[others])
                assert not torch.equal(
                    changed[case.starts[broken + 1] - 1], clean[case.starts[broken + 1] - 1]
                )


def test_keys_of_another_dtype_are_converted_to_that_of_the_queries() -> None:
    case = Case(((1, 9), (4, 14)))
    filled = fill(case)
    rounded = Filled(
        filled.q,
        filled.kv.bfloat16(),
        filled.block_table,
        [keys.bfloat16() for keys in filled.keys],
        [values.bfloat16() for values in filled.values],
    )
    actual = attend(case, rounded, 0.3)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), dense(case, rounded, 0.3), atol=2e-5, rtol=0)


def test_float16_keeps_finite_numbers_finite() -> None:
    kv = torch.zeros(1, 2, 1, 2, 4, dtype=torch.float16)
    k = torch.tensor([[[7e4, -3e38, math.inf, 0.1]]])
    reference.write_kv(kv, k, -k, torch.tensor([1]))
    assert kv[0, 0, 0, 1, :3].tolist() == [65504, -65504, math.inf]
    assert torch.equal(kv[0, :, 0, 1, 3], torch.tensor([0.1, -0.1]).half())
    assert k[0, 0, 0] == 7e4, "an input was written"


@given(
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99)
)
@settings(max_examples=40)
def test_write_kv_writes_only_its_slots(
    blocks: int, heads: int, block_size: int, head_dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(blocks, 2, heads, block_size, head_dim, generator=generator)
    before = kv.clone()
    count = int(torch.randint(blocks * block_size + 1, (), generator=generator))
    slots = torch.randperm(blocks * block_size, generator=generator)[:count]
    k = torch.randn(count, heads, head_dim, generator=generator)
    v = torch.randn(count, heads, head_dim, generator=generator)
    reference.write_kv(kv, k, v, slots)
    for i, slot in enumerate(slots.tolist()):
        before[slot // block_size, 0, :, slot % block_size] = k[i]
        before[slot // block_size, 1, :, slot % block_size] = v[i]
    assert torch.equal(kv, before)
