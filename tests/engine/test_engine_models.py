"""The engine with real tiny models in float32: the tokens do not depend on how a request runs."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.engine_kit import ask, assert_at_rest, of, run, tokens
from builders.tiny_models import write_tiny
from transformers import AutoModelForCausalLM

from pdserve.engine.api import (
    ChoiceState,
    ContextLengthExceeded,
    EngineConfig,
    Finished,
    PrefillComputed,
    PromptScored,
)
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.kv import pool_sizes

NEW = 20
Maker = Callable[..., Engine]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine_of(folder: Path) -> Maker:
    def make(**options: Any) -> Engine:
        defaults = {"kv_tokens": 4096, "block_size": 8, "chunk_size": 32, "weights": "float32"}
        engine, card = build_engine(EngineConfig(model=str(folder), **(defaults | options)))
        assert card.context_len == min(512, engine.limits.num_blocks * engine.limits.block_size)
        return engine

    return make


def prompts(count: int = 16) -> dict[str, list[int]]:
    rng = random.Random(5)
    return {f"r{i}": [rng.randrange(256) for _ in range(1 + 11 * i)] for i in range(count)}


def make_requests(sampled: bool, **options: Any) -> list[Any]:
    temperature = 1.0 if sampled else 0.0
    return [
        ask(
            key, prompt, seed=i, temperature=temperature, max_tokens=NEW, ignore_eos=True, **options
        )
        for i, (key, prompt) in enumerate(prompts().items())
    ]


@pytest.fixture(scope="module")
def alone(engine_of: Maker) -> dict[bool, dict[tuple[str, int], list[int]]]:
    """Return the tokens of every request run alone, without a prefix cache."""
    engine = engine_of(prefix_cache=False)
    return {
        sampled: {k: v for r in make_requests(sampled) for k, v in tokens(run(engine, r)).items()}
        for sampled in (False, True)
    }


def test_greedy_equals_transformers(folder: Path, alone: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for key, prompt in prompts().items():
        ids = [*prompt, *alone[False][key, 0]]
        with torch.inference_mode():
            logits = model(torch.tensor([ids[:-1]]), logits_to_keep=NEW).logits
        assert logits[0].argmax(-1).tolist() == alone[False][key, 0]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_batched_cached_preempted_and_chunked_requests_give_the_same_tokens(
    engine_of: Maker, alone: Any, sampled: bool
) -> None:
    batched = engine_of()
    widths: list[int] = []
    for request in make_requests(sampled):
        batched.submit(request)
    events = []
    while (plan := batched.schedule()) is not None:
        widths.append(len(plan.rows))
        events += batched.collect(batched.launch(plan)).events
    assert max(widths) == 16
    assert tokens(events) == alone[sampled]
    warm = run(batched, *make_requests(sampled))
    assert sum(e.cached_tokens for e in of(warm, Finished)) > 500
    assert tokens(warm) == alone[sampled]
    assert_at_rest(batched)

    small = engine_of(kv_tokens=400, prefix_cache=False)
    assert tokens(run(small, *make_requests(sampled))) == alone[sampled]
    assert small.stats().preemptions > 0

    for chunk_size in (7, 64):
        odd = engine_of(chunk_size=chunk_size, block_size=5)
        events = run(odd, *make_requests(sampled))
        assert {e.num_tokens % chunk_size for e in of(events, PrefillComputed) if not e.done} == {0}
        assert tokens(events) == alone[sampled]


def test_a_request_resumed_at_a_random_token_gives_the_same_tokens(
    engine_of: Maker, alone: Any
) -> None:
    engine, rng = engine_of(), random.Random(1)
    requests = []
    for i, (key, prompt) in enumerate(prompts().items()):
        state = (ChoiceState(tuple(alone[True][key, 0][: rng.randrange(1, NEW)])),)
        requests.append(
            ask(key, prompt, i, temperature=1.0, max_tokens=NEW, ignore_eos=True, choices=state)
        )
    got = tokens(run(engine, *requests))
    for request in requests:
        cut = len(request.choices[0].generated_ids)
        assert got[request.key, 0] == alone[True][request.key, 0][cut:]


def test_several_choices_alone_together_resumed_and_aborted(engine_of: Maker) -> None:
    options: dict[str, Any] = {
        "n": 3,
        "temperature": 1.0,
        "max_tokens": NEW,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "min_tokens": 3,
    }
    prompt = list(range(40, 77))
    whole = tokens(run(engine_of(prefix_cache=False), ask("a", prompt, 3, **options)))
    assert len({tuple(ids) for ids in whole.values()}) == 3
    busy = engine_of()
    events = run(busy, *make_requests(True), ask("a", prompt, 3, **options))
    assert {k: v for k, v in tokens(events).items() if k[0] == "a"} == whole
    cuts = (0, 5, 11)
    states = tuple(ChoiceState(tuple(whole["a", c][:cut])) for c, cut in enumerate(cuts))
    rest = tokens(run(busy, ask("a", prompt, 3, choices=states, **options)))
    assert rest == {("a", c): whole["a", c][cut:] for c, cut in enumerate(cuts)}
    busy.submit(ask("a", prompt, 3, **options))
    for _ in range(6):
        busy.step()
    busy.abort("a", [0])
    after = tokens(run(busy))
    assert after["a", 0] == []
    assert after["a", 1] == whole["a", 1][-len(after["a", 1]) :]
    assert_at_rest(busy)


def test_prompt_scores_equal_transformers(folder: Path, engine_of: Maker) -> None:
    prompt = list(range(30, 80))
    events = run(engine_of(), ask("a", prompt, prompt_logprobs=2, logprobs=1, max_tokens=1))
    (scored,) = of(events, PromptScored)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        raw = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    expected = [float(raw[i, token]) for i, token in enumerate(prompt[1:])]
    assert [s.logprob for s in scored.logprobs] == pytest.approx(expected, abs=1e-4)
    assert [s.top[0][0] for s in scored.logprobs] == raw[:-1].argmax(-1).tolist()


def test_a_measured_chunk_and_a_default_pool(engine_of: Maker) -> None:
    engine = engine_of(chunk_size=0, kv_tokens=0, max_running=4)
    spec = engine.kv.spec
    assert engine.limits.chunk_size in (64, 128, 256, 512)
    # At most a full batch of full contexts, and of windows.
    assert engine.limits.num_blocks == 4 * 512 // 8
    assert engine.kv.num_blocks == pool_sizes(spec, 4 * 512 // 8, 4, engine.limits.chunk_size)
    other = engine_of(kv_tokens=64)
    assert other.limits.context_len == 64
    assert other.kv_identity == engine.kv_identity
    half = engine_of(kv_dtype="bf16")
    assert half.kv_identity != engine.kv_identity
    assert half.numerics_id != engine.numerics_id
    with pytest.raises(ValueError, match="--step-tokens 40 is less than --max-running"):
        engine_of(step_tokens=40)


def test_the_context_of_learned_positions_ends_with_their_table(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "gpt2", max_position_embeddings=48)
    engine, card = build_engine(EngineConfig(model=str(path), kv_tokens=512, context_len=400))
    assert card.context_len == 48
    to_the_end = ask("a", range(40), max_tokens=None, ignore_eos=True)
    assert len(tokens(run(engine, to_the_end))["a", 0]) == 8
    with pytest.raises(ContextLengthExceeded, match="48"):
        engine.submit(ask("b", range(49), max_tokens=1))
    assert_at_rest(engine)
