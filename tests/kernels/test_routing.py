"""Routing of rows to experts: torch and native choices compared with transformers' routers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MixtralConfig,
    Qwen2MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from pdserve.engine.models import ExpertRouting
from pdserve.engine.models.torch_parts import choose_experts
from pdserve.kernels import _native

ROWS, EXPERTS, TOP_K = 10_000, 64, 8
CONTEXT = _native.Context(1)
NEAR = 1e-6  # ranks closer than this may come in either order
GROUPS = {"n_group": 8, "topk_group": 3}
ROUTERS: dict[str, tuple[Any, Any, ExpertRouting]] = {
    "mixtral": (
        MixtralTopKRouter,
        MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=EXPERTS),
        ExpertRouting(TOP_K, normalized=True),
    ),
    "qwen2": (
        Qwen2MoeTopKRouter,
        Qwen2MoeConfig(num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=EXPERTS),
        ExpertRouting(TOP_K),
    ),
    "glm4": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig(
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            hidden_size=EXPERTS,
            routed_scaling_factor=2.5,
            **GROUPS,
        ),
        ExpertRouting(TOP_K, "sigmoid", True, 2.5, groups=8, kept_groups=3, group_best=2),
    ),
    "minimax": (
        MiniMaxM2TopKRouter,
        MiniMaxM2Config(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=EXPERTS),
        ExpertRouting(TOP_K, "sigmoid", True),
    ),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            hidden_size=EXPERTS,
            routed_scaling_factor=16.0,
            topk_method="group_limited_greedy",
            **GROUPS,
        ),
        ExpertRouting(TOP_K, scale=16.0, groups=8, kept_groups=3),
    ),
    "gpt_oss": (
        GptOssTopKRouter,
        GptOssConfig(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=EXPERTS),
        ExpertRouting(TOP_K, normalized=True),
    ),
}


def native(
    logits: Tensor, correction: Tensor | None, routing: ExpertRouting
) -> tuple[Tensor, Tensor]:
    chosen = np.empty((len(logits), routing.top_k), np.int64)
    weights = np.empty(chosen.shape, np.float32)
    _native.choose_experts(
        CONTEXT,
        logits.numpy(),
        None if correction is None else correction.numpy(),
        routing.scores == "sigmoid",
        routing.normalized,
        routing.scale,
        routing.groups,
        routing.kept_groups,
        routing.group_best,
        chosen,
        weights,
    )
    return torch.from_numpy(chosen), torch.from_numpy(weights)


def spread(chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weight of each expert [rows, EXPERTS]; 0 for experts that are not chosen."""
    return torch.zeros(len(chosen), EXPERTS).scatter_(1, chosen, weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_chosen_experts_equal_those_of_transformers(subtests: pytest.Subtests, name: str) -> None:
    kind, config, routing = ROUTERS[name]
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn((ROWS, EXPERTS), generator=generator)
    router = kind(config)
    router.weight.data.copy_(torch.eye(EXPERTS))  # so that logits equal the input
    correction = None
    if routing.scores == "sigmoid":
        correction = 0.2 * torch.randn(EXPERTS, generator=generator)
    with torch.inference_mode():
        if name == "minimax":
            _, counts, chosen = router(logits, correction)
        else:
            if name == "gpt_oss":  # the router's bias is part of the logits
                router.bias.copy_(0.5 * torch.randn(EXPERTS, generator=generator))
            if correction is not None:
                router.e_score_correction_bias.copy_(correction)
            made, counts, chosen = router(logits)
            logits = made if name == "gpt_oss" else logits
    scores = torch.sigmoid(logits) if correction is not None else torch.softmax(logits, -1)
    ranks = scores if correction is None else scores + correction
    close = {"atol": 1e-6 * routing.scale, "rtol": 0}
    for choose in (choose_experts, native):
        with subtests.test(choose.__name__):
            actual = choose(logits, correction, routing)
            same = (actual[0].sort(-1).values == chosen.sort(-1).values).all(-1)
            for row in torch.where(~same)[0].tolist():  # only near ties may differ
                lost = set(chosen[row].tolist()) ^ set(actual[0][row].tolist())
                values = ranks[row, sorted(lost)]
                assert routing.groups > 1 or values.max() - values.min() < NEAR, (row, lost)
            assert (~same).sum() <= 2
            torch.testing.assert_close(spread(*actual)[same], spread(chosen, counts)[same], **close)
            assert len(set(map(tuple, actual[0].sort(-1).values.tolist()))) > ROWS / 2, (
                "too many rows choose the same experts"
            )


def test_the_first_of_equal_experts_are_chosen(subtests: pytest.Subtests) -> None:
    for choose in (choose_experts, native):
        with subtests.test(choose.__name__):
            logits = torch.zeros((2, 8))
            logits[1, 5] = 1
            chosen, counts = choose(logits, None, ExpertRouting(3, normalized=True))
            assert chosen.tolist() == [[0, 1, 2], [5, 0, 1]]
            torch.testing.assert_close(counts.sum(-1), torch.ones(2))
            grouped = ExpertRouting(2, "sigmoid", groups=4, kept_groups=1, group_best=2)
            assert choose(logits, torch.zeros(8), grouped)[0].tolist() == [[0, 1], [5, 4]]


def test_rows_of_nan_choose_some_experts() -> None:
    """A caller that passes NaN has a bug, but it must not crash the kernel."""
    logits = torch.full((3, 8), float("nan"))
    logits[1] = float("inf")
    logits[2, 3:] = float("-inf")
    for routing in (ExpertRouting(2), ExpertRouting(2, "sigmoid", True, groups=4, kept_groups=1)):
        chosen, _ = native(logits, None, routing)
        assert ((chosen >= 0) & (chosen < 8)).all()
        assert all(len(set(row)) == 2 for row in chosen.tolist()), "an expert was chosen twice"
    lowest = torch.tensor([0.0, *[-torch.inf] * 3])
    zeros = torch.zeros((1, 4))
    assert native(zeros, lowest, ExpertRouting(2))[0].tolist() == [[0, 1]]


def test_invalid_choices_are_refused(subtests: pytest.Subtests) -> None:
    for routing, error in (
        (ExpertRouting(9), "top_k must be 1 to the experts"),
        (ExpertRouting(2, groups=3), "multiple of groups"),
        (ExpertRouting(2, groups=4, kept_groups=5), "kept_groups must be"),
        (ExpertRouting(3, groups=4, kept_groups=1), "more than the kept groups have"),
        (ExpertRouting(1, groups=8, group_best=2), "group_best must be"),
    ):
        with subtests.test(error), pytest.raises(ValueError, match=error):
            native(torch.zeros((1, 8)), None, routing)
