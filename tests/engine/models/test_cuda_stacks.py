"""Weights of experts on the CUDA kernels: experts that differ in format, gates or column order give
the same results as each alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders.linear_cases import BF16, F16, F32, parts_of
from fakes import triton_interpreter  # noqa: F401  (before kernels run)
from torch import Tensor

from pdserve.engine.models import Linear
from pdserve.engine.models.cuda.experts import ExpertMatrices, ExpertProduct
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.parts import TensorSpec
from pdserve.engine.weights import RawTensor
from pdserve.engine.weights.convert import unpack
from pdserve.kernels.cuda.experts import group, tile_tokens

ROWS, COLS = 6, 256
GATE_UP = ("gate", "up")


def raw(form: str, seed: int) -> RawTensor:
    if form == "Q6_K":
        blocks = np.random.default_rng(seed).integers(0, 256, (ROWS, 210), dtype=np.uint8)
        blocks[:, 208:] = np.full((ROWS, 1), 0.01, np.float16).view(np.uint8)
        return RawTensor({"blocks": blocks}, form, (ROWS, COLS))
    group, kind, zeros = {
        "INT4": (64, F16, True),
        "FP8": (64, F32, False),
        "BF16": (0, BF16, False),
    }.get(form, (0, F16, False))
    return RawTensor(parts_of(form, ROWS, COLS, group, kind, zeros, seed), form, (ROWS, COLS))


def product(experts: list[list[RawTensor]]) -> tuple[ExpertProduct, DeviceWeights]:
    """Return the product of each expert's gate and up matrices, with biases."""
    stored: dict[str, RawTensor] = {}
    for n, raws in enumerate(experts):
        for name, one in zip(GATE_UP, raws, strict=True):
            stored[f"{n}.{name}"] = one
            bias = np.full(ROWS, n + 0.5, np.float32)
            stored[f"{n}.{name}.bias"] = RawTensor({"values": bias}, "F32", (ROWS,))
    weights = DeviceWeights(stored.pop, torch.float32, torch.device("cpu"))
    matrices = ExpertMatrices(weights, len(experts))
    for n in range(len(experts)):
        specs = tuple(TensorSpec(f"{n}.{name}", (ROWS, COLS)) for name in GATE_UP)
        biases = tuple(TensorSpec(f"{n}.{name}.bias", (ROWS,)) for name in GATE_UP)
        matrices.add(n, Linear(specs, biases))
    assert not stored, "a tensor was not requested"
    return matrices.product(), weights


CASES: dict[str, tuple[list[Any], int, int]] = {
    "all alike": ([("Q4_K", "Q4_K")] * 3, 1, 0),
    "gate and up differ": ([("Q4_K", "Q8_0")] * 3, 2, 0),
    "experts differ": ([("Q4_K", "Q4_K"), ("INT4", "INT4"), ("Q4_K", "Q4_K")], 2, 0),
    "one expert's up differs": ([("BF16", "BF16"), ("BF16", "FP8"), ("BF16", "BF16")], 3, 0),
    "a format without a packed form": ([("Q4_K", "Q4_K"), ("Q6_K", "Q6_K")], 2, 2),
}


def test_experts_of_different_formats(subtests: pytest.Subtests) -> None:
    for name in CASES:
        with subtests.test(name):
            formats, stacks, expanded = CASES[name]
            experts = [
                [raw(form, 10 * n + m) for m, form in enumerate(pair)]
                for n, pair in enumerate(formats)
            ]
            made, weights = product(experts)
            assert len(made.stacks) == stacks
            assert weights.expanded.total() == expanded
            assert_alone(made, experts)


def test_columns_in_a_different_order_are_expanded_to_plain_numbers() -> None:
    rng = np.random.default_rng(2)
    experts = [
        [replace(raw("INT4", 10 * n + m), columns=rng.permutation(COLS)) for m in range(2)]
        for n in range(3)
    ]
    made, weights = product(experts)
    assert len(made.stacks) == 1
    assert weights.expanded["INT4"] == 6
    assert_alone(made, experts)


def assert_alone(made: ExpertProduct, experts: list[list[RawTensor]]) -> None:
    """Check that every product equals that of its expert's values."""
    x = torch.randn(9, COLS, generator=torch.Generator().manual_seed(1))
    count = len(experts)
    chosen = (torch.arange(9)[:, None] % count).int()
    tiles = tile_tokens([stack for begin, stack in made.stacks], 9, count)
    groups = group(chosen, count, tiles)
    found: Tensor = made(x, groups, by_pair=False)
    for place, token in enumerate(groups.pairs.tolist()):
        values = torch.cat([torch.from_numpy(unpack(one)) for one in experts[token % count]])
        wanted = x[token].double() @ values.double().t() + token % count + 0.5
        assert (found[place] - wanted).norm() / wanted.norm() < 1e-5
