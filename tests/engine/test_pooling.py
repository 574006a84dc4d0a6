"""Embeddings from the engine equal transformers' and do not depend on how a request runs: bit for
bit on the native kernels, within the accuracy of matrix products on torch."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run
from builders.tiny_embedder import Oracle, write_embedder
from builders.tiny_models import write_tiny
from fakes.decoder import VOCAB, FakeDecoder, fake_spec

from pdserve.engine.api import (
    ChoiceState,
    ContextLengthExceeded,
    EngineConfig,
    Event,
    Finished,
    Grammar,
    InvalidRequest,
    NewTokens,
    Pooled,
    PrefillComputed,
    Request,
    RequestFailed,
    ThinkingBudget,
)
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine

MODELS = {"last": ("qwen3", "lasttoken"), "mean": ("llama", "mean_tokens")}
Maker = Callable[..., Engine]


def pool(key: str, prompt: list[int]) -> Request:
    return replace(ask(key, prompt), pool=True)


def make_requests(count: int = 12) -> list[Request]:
    rng = random.Random(3)
    lengths = [1 + 13 * i for i in range(count)]
    return [pool(f"r{n}", [rng.randrange(256) for _ in range(n)]) for n in lengths]


def vectors(events: list[Event]) -> dict[str, tuple[float, ...]]:
    return {event.key: event.values for event in of(events, Pooled)}


@pytest.fixture(scope="module", params=MODELS)
def pooling(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(pooling: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp(pooling), *MODELS[pooling])


@pytest.fixture(scope="module", params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def same(kernels: str) -> Callable[[Any, Any], bool]:
    """Return a comparison of vectors: bit for bit where that is guaranteed."""

    def compare(got: Any, want: Any) -> bool:
        if kernels == "native":
            return bool(got == want)
        return got.keys() == want.keys() and all(
            np.allclose(got[key], want[key], atol=1e-5, rtol=1e-5) for key in want
        )

    return compare


@pytest.fixture(scope="module")
def engine_of(kernels: str, folder: Path) -> Maker:
    def make(**options: Any) -> Engine:
        defaults = {"kv_tokens": 4096, "block_size": 16, "chunk_size": 32, "kv_dtype": "float32"}
        exact = {"weights": "float32", "kernels": kernels}
        engine, card = build_engine(EngineConfig(model=str(folder), **(defaults | exact | options)))
        assert card.pooling in MODELS
        assert card.hidden_size == 48
        assert card.normalizes
        return engine

    return make


@pytest.fixture(scope="module")
def alone(engine_of: Maker) -> dict[str, tuple[float, ...]]:
    """Return the vectors of every request run alone, without a prefix cache."""
    engine = engine_of(prefix_cache=False)
    return {
        key: v for request in make_requests() for key, v in vectors(run(engine, request)).items()
    }


def test_vectors_equal_those_of_transformers(folder: Path, pooling: str, alone: Any) -> None:
    oracle = Oracle(folder, pooling)
    for request in make_requests():
        got = torch.tensor(alone[request.key])
        assert torch.allclose(got, oracle.pooled(request.prompt_ids), atol=1e-4, rtol=1e-4)


def test_batched_requests_give_the_same_vectors(engine_of: Maker, alone: Any, same: Any) -> None:
    engine = engine_of(step_tokens=64 + 256)
    for request in make_requests():
        engine.submit(request)
    widths: list[int] = []
    events: list[Event] = []
    while (plan := engine.schedule()) is not None:
        widths.append(len(plan.rows))
        events += engine.collect(engine.launch(plan)).events
    assert max(widths) >= 6
    assert same(vectors(events), alone)
    assert [e.key for e in of(events, Finished)] == [e.key for e in of(events, Pooled)]
    assert not of(events, NewTokens)
    assert_at_rest(engine)


def test_chunks_give_the_same_vectors(engine_of: Maker, alone: Any, same: Any) -> None:
    for chunk_size in (16, 256):
        events = run(engine_of(chunk_size=chunk_size), *make_requests())
        parts = [e for e in of(events, PrefillComputed) if not e.done]
        assert bool(parts) == (chunk_size == 16)
        assert same(vectors(events), alone)


def test_prefix_hits_give_the_same_vectors(
    engine_of: Maker, pooling: str, alone: Any, same: Any
) -> None:
    engine = engine_of()
    run(engine, *make_requests())
    warm = run(engine, *make_requests())
    hits = sum(e.cached_tokens for e in of(warm, Finished))
    assert (hits > 500) == (pooling == "last"), (
        "a mean needs the states of all tokens, so it cannot use cached ones"
    )
    assert same(vectors(warm), alone)


def test_preempted_requests_give_the_same_vectors(engine_of: Maker, alone: Any, same: Any) -> None:
    engine = engine_of(kv_tokens=160, prefix_cache=False, chunk_size=16, context_len=160)
    longest = make_requests()[-1]
    engine.submit(longest)
    for _ in range(3):
        engine.step()
    job = engine.jobs.by_key[longest.key]
    assert job.sequences[0].num_computed == 48
    engine.jobs.preempt(job)
    assert same(vectors(run(engine)), {longest.key: alone[longest.key]})
    assert engine.stats().preemptions == 1
    assert_at_rest(engine)


def test_a_prompt_may_fill_the_context(engine_of: Maker) -> None:
    engine = engine_of(context_len=64)
    (found,) = vectors(run(engine, pool("whole", [7] * 64))).values()
    assert np.isfinite(found).all()
    with pytest.raises(ContextLengthExceeded):
        engine.submit(pool("more", [7] * 65))


def test_abort_releases_the_blocks(engine_of: Maker) -> None:
    engine = engine_of()
    engine.submit(make_requests()[-1])
    engine.step()
    assert engine.abort(make_requests()[-1].key)
    events = run(engine)
    assert not of(events, Pooled)
    assert of(events, Finished)
    assert_at_rest(engine)


def test_an_embedding_model_cannot_generate() -> None:
    engine = fake_engine(pooling="last")
    with pytest.raises(InvalidRequest, match="does not support text generation") as refused:
        engine.submit(ask("a", range(5)))
    assert refused.value.param == "model"


def test_a_generating_model_cannot_embed() -> None:
    with pytest.raises(InvalidRequest, match="The model does not support Embeddings API"):
        fake_engine().submit(pool("a", [1, 2, 3]))


@pytest.mark.parametrize(
    "changes",
    [
        {"choices": (ChoiceState((3,)),)},
        {"params": replace(ask("a", [1]).params, prompt_logprobs=1)},
    ],
)
def test_parameters_that_embeddings_of_a_prompt_do_not_support(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="cannot have choices or prompt_logprobs"):
        fake_engine(pooling="last").submit(replace(pool("a", [1, 2, 3]), **changes))


def test_sampling_parameters_that_embeddings_do_not_support(subtests: pytest.Subtests) -> None:
    for param, params in (
        ("n", {"n": 2}),
        ("allowed_token_ids", {"allowed_token_ids": (1,)}),
        ("bad_words", {"bad_words": ((1,),)}),
        ("grammar", {"grammar": Grammar("{}")}),
        ("thinking", {"thinking": ThinkingBudget(3, (1,))}),
    ):
        with subtests.test(param):
            engine = fake_engine(pooling="last")
            with pytest.raises(InvalidRequest, match=rf"\b{param}\b") as refused:
                engine.submit(replace(ask("a", [1, 2, 3], **params), pool=True))
            assert refused.value.param == param


def test_mean_pooling_publishes_no_prefix() -> None:
    for kind in ("last", "mean"):
        engine = fake_engine(pooling=kind)
        request = pool("a", list(range(20)))
        run(engine, request)
        added, _ = engine.take_prefix_events()
        assert bool(added) == (kind == "last")
        assert bool(engine.chain(request)) == (kind == "last")


def test_an_embedding_request_can_be_neither_reserved_nor_held() -> None:
    engine = fake_engine(pooling="mean")
    with pytest.raises(InvalidRequest, match="must also compute this prompt"):
        engine.reserve(pool("a", [1, 2, 3]))
    engine.submit(pool("b", list(range(17))))
    engine.step()
    assert engine.jobs.by_key["b"].sequences[0].num_left == 1
    assert engine.freeze("b") is None


class NotFinite(FakeDecoder):
    def states(self, hidden: torch.Tensor) -> Any:
        states = hidden.numpy().copy()
        states[0, VOCAB // 2] = np.inf
        return states


def test_nonfinite_states_fail_the_request() -> None:
    engine = fake_engine(pooling="last", model=NotFinite(fake_spec()))
    (failed,) = of(run(engine, pool("a", list(range(20)))), RequestFailed)
    assert failed.message == "the hidden states are not finite"
    assert not engine.num_found(engine.chain(pool("b", list(range(20)))))


def test_any_decoder_embeds_if_configured_to(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", "qwen3")
    options: dict[str, Any] = {"kv_tokens": 1024, "weights": "float32"}
    engine, card = build_engine(EngineConfig(model=str(path), pooling="mean", **options))
    assert (card.pooling, card.normalizes) == ("mean", True)
    (got,) = vectors(run(engine, pool("a", [5, 6, 7]))).values()
    want = Oracle(path, "mean").pooled([5, 6, 7])
    assert torch.allclose(torch.tensor(got), want, atol=1e-4, rtol=1e-4)
    other, plain = build_engine(EngineConfig(model=str(path), **options))
    assert plain.pooling == ""
    assert other.kv_identity != engine.kv_identity
    assert of(run(other, ask("a", [5, 6, 7])), NewTokens)
