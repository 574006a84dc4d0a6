"""Every architecture in a batch of mixed lengths and after a hand-off: 64 greedy tokens each.

The tokens must equal those of single requests and of transformers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.engine_kit import ask, run, tokens
from builders.tiny_models import (
    ARCHITECTURES,
    MULTIMODAL,
    in_tiers,
    transformers_class,
    write_tiny,
)
from systems.handoff_pair import Pair, fresh

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

PROMPTS = [
    torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (70, 5, 33, 48)
]
COUNT = 64
NEAR_TIE = 1e-4  # of logits: both are computed in float32


def engine_of(path: Path) -> Engine:
    config = EngineConfig(
        model=str(path), kernels="native", kv_dtype="float32", kv_tokens=2048, threads=1
    )
    return build_engine(config)[0]


def assert_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    """Check that each token has the best of transformers' logits after its predecessors, or is
    within NEAR_TIE.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    behind = logits.max(1).values - logits[torch.arange(len(answer)), answer]
    assert behind.max() <= NEAR_TIE
    assert (behind == 0).sum() >= len(answer) - 2


@pytest.mark.parametrize("arch", in_tiers((*ARCHITECTURES, *MULTIMODAL)))
def test_tokens_are_the_same_in_a_batch_and_after_a_handoff(arch: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", arch, seed=4)
    requests = [fresh(ask("", p, max_tokens=COUNT, ignore_eos=True)) for p in PROMPTS]
    alone = [tokens(run(engine_of(path), one))[one.key, 0] for one in requests]
    model_class = transformers_class(path)
    model = model_class.from_pretrained(path, attn_implementation="eager").eval()
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        assert len(answer) == COUNT
        assert_greedy(model, prompt, answer)
    together = tokens(run(engine_of(path), *requests))
    assert [together[one.key, 0] for one in requests] == alone
    for transport in ("tcp", "shm"):
        pair = Pair(engine_of(path), engine_of(path), transport, tmp_path)
        try:
            sent = [fresh(one) for one in requests]
            attempts = [pair.hand_off(one) for one in sent]
            assert [pair.answer(one)[0] for one in sent] == alone
            pair.wait(lambda: len(pair.sent) == len(sent))  # noqa: B023
            assert {pair.received[attempt].transport for attempt in attempts} == {transport}
            pair.assert_clean()
        finally:
            pair.close()
