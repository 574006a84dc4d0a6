"""The engine on the CUDA kernels, interpreted: recorded steps that run ahead give the same tokens
as sequential single launches, and as each request alone."""

from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import ask, assert_at_rest, of, run, tokens
from builders.interpreted_engine import ReplayRecorder, interpreted_engine
from builders.tiny_models import write_tiny

from pdserve.engine.api import Finished

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(300)]

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 5},
    {"temperature": 0.8, "max_tokens": 7},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "max_tokens": 4},
    {"temperature": 0.9, "max_tokens": 6, "ignore_eos": True},
)


def requests() -> list[Any]:
    return [
        ask(f"r{n}", [(7 * n + i) % 250 for i in range(3 + 9 * n)], seed=n, **options)
        for n, options in enumerate(KINDS)
    ]


@pytest.mark.parametrize("arch", ["qwen3", "gemma3", "mixtral"])
def test_recorded_steps_ahead_do_not_change_tokens(arch: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, arch, seed=8, head_dim=16)
    plain = tokens(run(interpreted_engine(path, ahead=False), *requests()))
    recorder = ReplayRecorder()
    engine = interpreted_engine(path, ahead=True, recorder=recorder)
    events = run(engine, *requests())
    assert tokens(events) == plain
    assert len(of(events, Finished)) == 4
    assert {1, 2, 4} >= set(recorder.replayed)
    assert len(recorder.replayed) >= 4
    assert_at_rest(engine)
    for request in requests()[:2]:
        (found,) = tokens(run(engine, request)).values()
        assert found == plain[request.key, 0]


def test_recorded_steps_do_not_change_penalties_and_logprobs(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama", seed=8, head_dim=16, num_hidden_layers=1)
    request = [
        ask("penalty", range(5), temperature=0.7, repetition_penalty=1.4, max_tokens=6),
        ask("scores", range(9), logprobs=3, max_tokens=4),
        ask("bias", range(4), logit_bias={7: 100.0}, max_tokens=3),
    ]
    recorder = ReplayRecorder()
    events = run(interpreted_engine(path, ahead=True, recorder=recorder), *request)
    plain = run(interpreted_engine(path, ahead=False), *request)
    assert tokens(events) == tokens(plain)
    assert tokens(events)["bias", 0] == [7, 7, 7]
    assert recorder.replayed
