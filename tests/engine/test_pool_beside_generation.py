"""A generating engine with --pool: its embeddings equal those of an embedding engine bit for bit,
alone, in a batch and beside generations, and its tokens those of an engine without the option."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens
from builders.tiny_embedder import Oracle, write_embedder, write_pooling
from builders.tiny_models import write_tiny

from pdserve.engine.api import (
    EngineConfig,
    Event,
    Finished,
    InvalidRequest,
    Pooled,
    Request,
)
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CardData, CheckpointError
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model

KINDS = ("last", "mean")
OPTIONS: dict[str, Any] = {
    "kv_tokens": 4096,
    "block_size": 16,
    "chunk_size": 32,
    "kv_dtype": "float32",
    "weights": "float32",
    "kernels": "native",
}
Build = Callable[..., tuple[Engine, CardData]]


def ids_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def embeds() -> list[Request]:
    """Return requests for embeddings of prompts of one token to several chunks."""
    return [
        replace(ask(f"e{n}", ids_of(n, n)), pool=True) for n in (1, 2, 16, 31, 33, 64, 65, 97, 150)
    ]


def generations() -> list[Request]:
    """Return generations of every kind of row: greedy, sampled, several choices, scores."""
    return [
        ask("g0", ids_of(40, 100), max_tokens=60),
        ask("g1", ids_of(70, 101), seed=5, temperature=0.8, max_tokens=60, n=2),
        ask("g2", ids_of(33, 102), max_tokens=40, logprobs=2),
        ask("g3", ids_of(50, 103), max_tokens=20, prompt_logprobs=1),
    ]


def vectors(events: list[Event]) -> dict[str, tuple[float, ...]]:
    return {event.key: event.values for event in of(events, Pooled)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("pool") / "m", "qwen3")


@pytest.fixture(scope="module")
def build(folder: Path) -> Build:
    return lambda **options: build_engine(EngineConfig(model=str(folder), **{**OPTIONS, **options}))


@pytest.fixture(scope="module")
def plain(build: Build) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of the generations in an engine without the option."""
    return tokens(run(build()[0], *generations()))


def test_vectors_and_tokens_are_those_of_separate_engines(
    build: Build, folder: Path, plain: Any, subtests: pytest.Subtests
) -> None:
    for kind in KINDS:
        with subtests.test(kind):
            embedder, _ = build(task="embed", pooling=kind, prefix_cache=False)
            want = {r.key: vectors(run(embedder, r))[r.key] for r in embeds()}
            oracle = Oracle(folder, kind)
            engine, card = build(pool=kind, step_tokens=64 + 128)
            assert (card.pooling, card.pool, card.normalizes) == ("", kind, True)
            for request in generations():
                engine.submit(request)
            events: list[Event] = []
            shared, left = 0, embeds()
            for _ in range(4000):
                plan = engine.schedule()
                if plan is None:
                    break
                pools = [row.sequence.job.pooled is not None for row in plan.rows]
                shared += any(pools) and not all(pools)
                events += engine.collect(engine.launch(plan)).events
                if left and len(events) % 2:  # they join while others generate
                    engine.submit(left.pop())
            assert not left
            assert shared > 5, "embeddings must share steps with generations"
            assert vectors(events) == want
            assert tokens(events) == plain
            for request in embeds():
                got = torch.tensor(want[request.key])
                assert torch.allclose(got, oracle.pooled(request.prompt_ids), atol=1e-4, rtol=1e-4)
            assert_at_rest(engine)


def test_cached_prefixes_are_shared_with_generations(
    build: Build, plain: Any, subtests: pytest.Subtests
) -> None:
    """An embedding by the last token uses the KV of a generation; a mean computes all tokens, and
    leaves KV that a generation uses."""
    for kind in KINDS:
        with subtests.test(kind):
            first, _ = build(pool=kind, prefix_cache=False)
            (generation,) = (r for r in generations() if r.key == "g0")
            prompt = list(generation.prompt_ids)
            embedding = replace(ask("e", prompt), pool=True)
            want = vectors(run(first, embedding))
            engine, _ = build(pool=kind)
            run(engine, replace(generation, key="warm"))
            events = run(engine, embedding)
            assert vectors(events) == want
            (finished,) = of(events, Finished)
            assert finished.cached_tokens == (32 if kind == "last" else 0)
            other, _ = build(pool=kind)
            run(other, embedding)
            events = run(other, generation)
            (finished,) = of(events, Finished)
            assert finished.cached_tokens == 32
            assert tokens(events)["g0", 0] == plain["g0", 0]


def test_kv_is_that_of_engines_without_the_option(build: Build) -> None:
    identities = {build(pool=pool)[0].kv_identity for pool in ("none", *KINDS)}
    assert len(identities) == 1


def test_without_the_option_the_refusal_names_it() -> None:
    """A reranker cannot have the option."""
    request = replace(ask("a", [1, 2, 3]), pool=True)
    with pytest.raises(InvalidRequest, match="--pool last or mean"):
        fake_engine().submit(request)
    with pytest.raises(InvalidRequest, match=r"The model does not support Embeddings API$"):
        fake_engine(scores=True).submit(request)


def test_tenants_take_turns_between_embeddings_and_generations() -> None:
    """Many embeddings of one tenant delay neither the prompt nor the tokens of another."""
    engine = fake_engine(pool="mean", num_blocks=256, context_len=64, shared_step_tokens=16)
    for n in range(20):
        request = replace(ask(f"e{n}", [n % 7 + 1] * 40), pool=True, tenant=b"a")
        engine.submit(request)
    engine.submit(replace(ask("g", [1] * 40, max_tokens=4), tenant=b"b"))
    order = [event.key for event in of(run(engine), Finished)]
    assert len(order) == 21
    assert order.index("g") < 8


def test_the_option_is_for_models_that_generate(
    folder: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"task": "embed"}, "--pool mean contradicts --task embed"),
        ({"task": "score"}, "--pool mean contradicts --task score"),
        ({"pooling": "last"}, "--pool mean contradicts --pooling last"),
    )
    for options, sentence in refused:
        with subtests.test(sentence), pytest.raises(ValueError, match=sentence):
            load_model(EngineConfig(model=str(folder), pool="mean", **options), lambda *_: None)
    headless = write_embedder(tmp_path / "headless", "qwen3")
    with pytest.raises(CheckpointError, match="--pool mean: the model has no output head"):
        load_model(EngineConfig(model=str(headless), pool="mean"), lambda *_: None)


def test_the_option_prevails_over_the_pooling_of_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model generates; its files only say whether vectors are normalized."""
    path = write_embedder(tmp_path / "m", "qwen3", headless=False, normalizes=False)
    config = EngineConfig(model=str(path), pool="mean", **OPTIONS)
    card = load_model(config, lambda *_: None).card
    assert (card.pooling, card.pool, card.normalizes) == ("", "mean", False)
    write_pooling(path, "max_tokens")
    card = load_model(config, lambda *_: None).card
    assert (card.pool, card.normalizes) == ("mean", True)
    assert "--pool mean replaces the model's pooling settings" in caplog.text
