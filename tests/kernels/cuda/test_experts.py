"""Mixtures of experts in Triton's interpreter: their values, and what the values do not depend
on."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from builders.linear_cases import BF16, F32, KINDS, error, made, tokens_for
from fakes import triton_interpreter  # noqa: F401
from torch import Tensor

from pdserve.engine.models import ExpertRouting
from pdserve.engine.models.torch_parts import choose_experts
from pdserve.kernels.cuda.experts import (
    Groups,
    MatrixStack,
    choose,
    combine,
    group,
    grouped_product,
    max_tiles,
    tile_tokens,
)
from pdserve.kernels.cuda.layer import gated
from pdserve.kernels.cuda.linear import DeviceMatrix, linear, splits_of

pytestmark = pytest.mark.kernels

# Experts, routing, whether scores are corrected.
ROUTED: dict[str, tuple[int, ExpertRouting, bool]] = {
    "one": (1, ExpertRouting(1), False),
    "all": (3, ExpertRouting(3, normalized=True), False),
    "mixtral": (8, ExpertRouting(2, normalized=True), False),
    "qwen2_moe": (60, ExpertRouting(4), False),
    "qwen3_moe": (128, ExpertRouting(8, normalized=True), False),
    "gpt_oss": (32, ExpertRouting(4, normalized=True), False),
    "minimax_m2": (256, ExpertRouting(8, "sigmoid", True), True),
    "deepseek_v2": (
        160,
        ExpertRouting(6, scale=16.0, groups=8, kept_groups=3, group_best=1),
        False,
    ),
    "deepseek_v3": (
        256,
        ExpertRouting(8, "sigmoid", True, 2.5, groups=8, kept_groups=4, group_best=2),
        True,
    ),
    "kimi_k2": (384, ExpertRouting(8, "sigmoid", True, 2.827), True),
    "odd groups": (15, ExpertRouting(4, groups=3, kept_groups=2, group_best=3), True),
    "few left": (6, ExpertRouting(3, "sigmoid", groups=3, kept_groups=1, group_best=2), False),
}


def randoms(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ascending(chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = chosen.argsort(1)
    return chosen.gather(1, order), weights.gather(1, order)


@pytest.mark.parametrize("name", ROUTED)
def test_chosen_experts_are_those_of_the_reference(name: str) -> None:
    experts, routing, corrected = ROUTED[name]
    logits = randoms(40, experts)
    correction = randoms(experts, seed=1) * 0.1 if corrected else None
    chosen, weights = choose(logits, correction, **asdict(routing))
    wanted, wanted_weights = ascending(*choose_experts(logits, correction, routing))
    assert torch.equal(chosen, wanted.int())
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-6, atol=1e-7)
    for n in (0, 17, 39):
        alone = choose(logits[n : n + 1], correction, **asdict(routing))
        assert torch.equal(alone[0][0], chosen[n])
        assert torch.equal(alone[1][0], weights[n])


def test_the_first_of_equal_experts_are_chosen() -> None:
    chosen, weights = choose(torch.zeros(1, 20), None, 3, normalized=True)
    assert chosen.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))
    logits = torch.tensor([[0.0, -0.0, 1.0, 1.0, -0.0, 0.0]])
    assert choose(logits, None, 3)[0].tolist() == [[0, 2, 3]]
    in_groups: dict[str, Any] = {"groups": 4, "kept_groups": 2, "group_best": 2}
    assert choose(torch.zeros(1, 20), None, 7, **in_groups)[0].tolist() == [[*range(7)]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinite_logits_choose_valid_experts(value: float) -> None:
    logits = randoms(3, 12)
    logits[0, ::2] = value  # then no softmax score is a number
    logits[1, 5] = value
    chosen, weights = choose(logits, None, 4, groups=3, kept_groups=2, group_best=2)
    assert ((chosen >= 0) & (chosen < 12)).all()
    assert (chosen.diff(dim=1) > 0).all()
    clean = choose(logits[2:], None, 4, groups=3, kept_groups=2, group_best=2)
    assert torch.equal(chosen[2:], clean[0])
    assert torch.equal(weights[2:], clean[1])


def test_invalid_routings_are_refused() -> None:
    for bad in ({"top_k": 5}, {"groups": 3}, {"groups": 2, "group_best": 3}, {"kept_groups": 2}):
        with pytest.raises(ValueError, match="of 4 experts"):
            choose(torch.zeros(1, 4), None, **{"top_k": 2, **bad})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="correction"):
        choose(torch.zeros(1, 4), torch.zeros(5), 2)
    with pytest.raises(ValueError, match="float16"):
        choose(torch.zeros(1, 4).half(), None, 2)


def sent(tokens: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    """Return distinct random experts for each token, in ascending order."""
    order = randoms(tokens, experts, seed=seed).argsort(1)[:, :top_k]
    return order.sort(1).values.int()


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "tile"),
    [
        (1, 5, 2, 16),
        (7, 5, 5, 16),
        (3, 128, 8, 16),
        (40, 3, 1, 16),
        (1100, 4, 2, 64),
        (9, 1, 1, 32),
    ],
)
def test_pairs_are_sorted_by_expert_and_token(
    tokens: int, experts: int, top_k: int, tile: int
) -> None:
    chosen = sent(tokens, experts, top_k)
    groups = group(chosen, experts, tile)
    flat = chosen.flatten().long()
    order = torch.sort(flat, stable=True).indices
    assert torch.equal(groups.pairs, order.int())
    assert torch.equal(groups.places.flatten()[order], torch.arange(len(flat)).int())
    counts = torch.bincount(flat, minlength=experts)
    assert torch.equal(groups.ends, counts.cumsum(0).int())
    tiles = [
        (n, int(groups.ends[n] - counts[n]) + at)
        for n in range(experts)
        for at in range(0, int(counts[n]), tile)
    ]
    assert groups.tile_experts.tolist()[: len(tiles)] == [n for n, _ in tiles]
    assert groups.tile_firsts.tolist()[: len(tiles)] == [first for _, first in tiles]
    assert set(groups.tile_experts.tolist()[len(tiles) :]) <= {-1}


def test_max_tiles_is_the_maximum_over_all_distributions() -> None:
    for pairs in range(1, 9):
        for experts in range(1, 5):
            splits = [[]] if experts == 0 else _splits(pairs, experts)
            most = max(sum(-(-count // 3) for count in split) for split in splits)
            assert max_tiles(pairs, experts, 3) == most


def _splits(pairs: int, experts: int) -> list[list[int]]:
    if experts == 1:
        return [[pairs]]
    return [
        [n, *rest] for n in range(pairs + 1) for rest in _splits(pairs - n, experts - 1)
    ]  # fmt: skip


def stacked(matrices: list[DeviceMatrix], experts: list[int], count: int) -> MatrixStack:
    """Return a stack of the matrices of `experts`, out of `count` experts."""
    parts = [(m.values, m.scales, m.zeros) for m in matrices]
    tensors = tuple(
        None if some[0] is None else torch.stack([one for one in some if one is not None])
        for some in zip(*parts, strict=True)
    )
    numbers = torch.full((count,), -1, dtype=torch.int32)
    numbers[experts] = torch.arange(len(experts), dtype=torch.int32)
    return MatrixStack(matrices[0], tensors, numbers)


def matrices_of(
    case: tuple[Any, ...], count: int, rows: int, dtype: torch.dtype
) -> list[DeviceMatrix]:
    return [made(case, rows, dtype, seed)[0] for seed in range(count)]


def run(
    x: Tensor, stack: MatrixStack, chosen: Tensor, bias: Tensor | None, by_pair: bool
) -> tuple[Tensor, Groups]:
    experts = len(stack.numbers)
    groups = group(chosen, experts, tile_tokens([stack], chosen.numel(), experts))
    out = torch.full((chosen.numel(), stack.first.rows), 7.0).to(x.dtype)
    grouped_product(x, stack, groups, bias, out, by_pair=by_pair)
    return out, groups


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.bfloat16) for case in KINDS), (KINDS[0], torch.float32)],
    ids=str,
)
def test_a_product_has_the_bits_of_the_expert_alone(
    case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    """Checks one token, a few, and enough for wider tiles. One expert has no token."""
    matrices = matrices_of(case, 4, 10, dtype)
    assert splits_of(matrices[0])[0] > 1
    stack = stacked(matrices, [0, 1, 2, 3], 4)
    bias = randoms(4, 10)
    for tokens in (1, 9, 70):
        chosen = sent(tokens, 3, 2)  # the last expert gets no token
        x = tokens_for(matrices[0], tokens)
        out, groups = run(x, stack, chosen, bias, by_pair=False)
        given = groups.pairs.long() // 2
        by_pair, _ = run(x[given], stack, chosen, bias, by_pair=True)
        assert torch.equal(out, by_pair)
        first = 0
        for n, end in enumerate(groups.ends.tolist()):
            wanted = linear(x[given[first:end]], matrices[n], bias[n].contiguous())
            assert torch.equal(out[first:end], wanted)
            first = end


@pytest.mark.parametrize("rows", [1, 65, 130])
def test_rows_that_do_not_fill_a_tile(rows: int) -> None:
    """All tokens go to one expert; `x` and `out` are slices of wider rows."""
    matrices = matrices_of(KINDS[3], 3, rows, torch.bfloat16)
    stack = stacked(matrices, [0, 1, 2], 3)
    wide = randoms(21, 640 + 16).bfloat16()
    x = wide[:, 8 : 8 + 640]
    groups = group(torch.full((21, 1), 2, dtype=torch.int32), 3, 16)
    out = torch.full((21, rows + 20), 7.0)
    grouped_product(x, stack, groups, None, out[:, 10 : 10 + rows], by_pair=False)
    assert torch.equal(out[:, 10 : 10 + rows], linear(x, matrices[2], out_dtype=torch.float32))
    assert (out[:, :10] == 7).all()
    assert (out[:, 10 + rows :] == 7).all()


def test_a_stack_does_not_touch_the_outputs_of_other_experts() -> None:
    """Of five experts, three have INT4 weights in one stack and two have BF16 weights in another.
    Each stack writes only its experts' outputs."""
    some = matrices_of(KINDS[3], 3, 10, torch.bfloat16)
    others = matrices_of(("BF16", 640, 0, BF16, False), 2, 10, torch.bfloat16)
    stacks = stacked(some, [0, 2, 3], 5), stacked(others, [4, 1], 5)
    chosen, x = sent(12, 5, 2), randoms(12, 640).bfloat16()
    groups = group(chosen, 5, tile_tokens(stacks, 24, 5))
    out = torch.full((24, 10), 7.0).bfloat16()
    grouped_product(x, stacks[0], groups, None, out, by_pair=False)
    expert = chosen.flatten()[groups.pairs.long()]
    assert (out[(expert == 1) | (expert == 4)] == 7).all()
    grouped_product(x, stacks[1], groups, None, out, by_pair=False)
    by_expert = {0: some[0], 2: some[1], 3: some[2], 4: others[0], 1: others[1]}
    for pair, n in enumerate(expert.tolist()):
        token = int(groups.pairs[pair]) // 2
        assert torch.equal(out[pair : pair + 1], linear(x[token : token + 1], by_expert[n]))


# Tokens, experts, top_k, hidden, size, activation, whether there are biases, a shared expert, a
# gate of the shared expert.
MIXTURES: tuple[tuple[int, int, int, int, int, Any, bool, bool, bool], ...] = (
    (1, 1, 1, 16, 16, "silu", False, False, False),
    (1, 7, 3, 40, 24, "silu", False, True, True),
    (2, 5, 2, 100, 33, "gelu_tanh", False, False, False),
    (3, 33, 8, 65, 10, "silu", False, True, False),
    (5, 4, 4, 64, 70, "swiglu_oai", True, False, False),
    (8, 3, 1, 17, 130, "silu", True, True, True),
    (13, 9, 2, 48, 48, "gelu", False, False, False),
    (17, 2, 2, 31, 20, "silu", False, True, True),
    (20, 16, 5, 80, 8, "swiglu_oai", True, False, False),
    (33, 3, 2, 24, 66, "silu", False, True, False),
    (40, 6, 1, 129, 16, "silu", False, False, False),
    (66, 2, 1, 20, 28, "silu", True, True, True),
)


class Mixture:
    """Unquantized weights, and the reference computed from them."""

    def __init__(self, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
        _, self.count, self.top_k, hidden, size, self.activation, biased, shared, gated = shape
        form = ("F32", F32) if dtype == torch.float32 else ("BF16", BF16)
        self.up_values, self.down_values, ups, downs = [], [], [], []
        for n in range(self.count + 1):  # the last expert is the shared one
            for cols, rows, values, found in (
                (hidden, 2 * size, self.up_values, ups),
                (size, hidden, self.down_values, downs),
            ):
                matrix, weight = made((form[0], cols, 0, form[1], False), rows, dtype, n)
                values.append(weight * 5)
                found.append(replace(matrix, values=matrix.values * 5))
        every = list(range(self.count))
        self.up, self.down = (stacked(ms[:-1], every, self.count) for ms in (ups, downs))
        self.shared = (ups[-1], downs[-1]) if shared else None
        self.gated = gated
        self.biases = (
            (randoms(self.count, 2 * size), randoms(self.count, hidden)) if biased else (None, None)
        )

    def __call__(self, x: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
        chosen, weights = choose(logits, None, self.top_k, normalized=True)
        stacks = (self.up, self.down)
        groups = group(chosen, self.count, tile_tokens(stacks, chosen.numel(), self.count))
        between = x.new_empty(chosen.numel(), self.up.first.rows)
        grouped_product(x, self.up, groups, self.biases[0], between, by_pair=False)
        results = x.new_empty(chosen.numel(), self.down.first.rows)
        between = gated(between, self.activation)
        grouped_product(between, self.down, groups, self.biases[1], results, by_pair=True)
        shared = None
        if self.shared:
            shared = linear(gated(linear(x, self.shared[0]), self.activation), self.shared[1])
        return combine(results, weights, groups, shared, gate if self.gated else None)

    def reference(self, x: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
        """Return the mixture in float64 for the same chosen experts."""
        routing = ExpertRouting(self.top_k, normalized=True)
        chosen, weights = choose_experts(logits, None, routing)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for n in range(self.count):
            tokens, ranks = torch.where(chosen == n)
            biases = [None if bias is None else bias[n].double() for bias in self.biases]
            out[tokens] += self._mlp(x[tokens], n, biases) * weights[tokens, ranks, None].double()
        if self.shared:
            result = self._mlp(x, -1, [None, None])
            out += result * torch.sigmoid(gate.double()) if self.gated else result
        return out

    def _mlp(self, x: Tensor, n: int, biases: list[Tensor | None]) -> Tensor:
        linear64 = torch.nn.functional.linear
        gate, up = linear64(x.double(), self.up_values[n].double(), biases[0]).chunk(2, 1)
        match self.activation:
            case "silu":
                between = torch.nn.functional.silu(gate) * up
            case "swiglu_oai":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                between = gate * torch.sigmoid(gate * 1.702) * (up + 1)
            case kind:
                approximate = "tanh" if kind == "gelu_tanh" else "none"
                between = torch.nn.functional.gelu(gate, approximate=approximate) * up
        return linear64(between, self.down_values[n].double(), biases[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", MIXTURES, ids=str)
def test_a_mixture_equals_the_reference(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Each token also has the same bits as when it is computed alone."""
    mixture, tokens = Mixture(shape, dtype), shape[0]
    x = randoms(tokens, shape[3]).to(dtype)
    logits, gate = randoms(tokens, shape[1], seed=1), randoms(tokens, 1, seed=2)
    found = mixture(x, logits, gate)
    wanted = mixture.reference(x, logits, gate)
    assert found.dtype == dtype
    assert error(found, wanted) < (1e-5 if dtype == torch.float32 else 1e-2)
    for n in {0, tokens // 2, tokens - 1}:
        some = slice(n, n + 1)
        assert torch.equal(mixture(x[some], logits[some], gate[some]), found[some])
    some = slice(tokens // 3, None)
    assert torch.equal(mixture(x[some], logits[some], gate[some]), found[some])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_are_added_in_the_order_of_the_experts(dtype: torch.dtype) -> None:
    """Each product and each sum is rounded, as in the torch reference."""
    chosen, weights = sent(6, 9, 4), randoms(6, 4).abs()
    groups = group(chosen, 9, 16)
    results, shared = randoms(24, 50).to(dtype), randoms(6, 50, seed=3).to(dtype)
    gate = randoms(6, 1, seed=4)
    out = torch.zeros(6, 50, dtype=dtype)
    for n in range(9):
        tokens, ranks = torch.where(chosen == n)
        places = groups.places[tokens, ranks].long()
        out[tokens] += results[places] * weights[tokens, ranks, None].to(dtype)
    assert torch.equal(combine(results, weights, groups), out)
    assert torch.equal(combine(results, weights, groups, shared), out + shared)
    wanted = out + shared * torch.sigmoid(gate).to(dtype)
    found = combine(results, weights, groups, shared, gate)
    torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)


def test_no_tokens() -> None:
    mixture = Mixture(MIXTURES[1], torch.float32)
    nothing = torch.empty(0, 40), torch.empty(0, 7), torch.empty(0, 1)
    assert mixture(*nothing).shape == (0, 40)


def test_tensors_of_wrong_shape_or_dtype_are_refused() -> None:
    stack = stacked(matrices_of(KINDS[3], 2, 10, torch.bfloat16), [0, 1], 2)
    groups = group(torch.zeros(3, 1, dtype=torch.int32), 2, 16)
    x, out = torch.zeros(3, 640).bfloat16(), torch.zeros(3, 10)

    def refused(why: str, x: Tensor = x, out: Tensor = out, bias: Tensor | None = None) -> None:
        with pytest.raises(ValueError, match=why):
            grouped_product(x, stack, groups, bias, out, by_pair=False)

    refused("x is", x=x[:, :383])
    refused("x is", x=x.float())
    refused("x is", x=x[:2])
    refused("out is", out=out[:, :9])
    refused("bias is", bias=torch.zeros(3, 10))
    with pytest.raises(ValueError, match="chosen are"):
        group(torch.zeros(3, 1, dtype=torch.int64), 2, 16)
