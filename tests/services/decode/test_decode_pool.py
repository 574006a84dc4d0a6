"""Embeddings of a decode worker: computed there, sent once, and resent to a session that missed
them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from builders.engine_kit import ask, fake_engine, of, run
from systems.eventually import eventually
from systems.parking import EPOCH, another, ask_again
from systems.worker_kit import Pair, prompt

from pdserve.engine.api import Pooled
from pdserve.protos import common_pb2 as pb

ENGINE = {"pooling": "mean"}
ENDS = {"finished", "failed"}


def pooled(ids: list[int]) -> list[float]:
    """Return the values of the same request in a separate engine."""
    request = replace(ask("a", ids), pool=True)
    (event,) = of(run(fake_engine(pooling="mean"), request), Pooled)
    return list(event.values)


def test_an_embedding_is_computed_there_though_a_prefill_worker_is_named(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(40), remote=True, pool=True)
        finished = await pair.decode.wait("finished", attempt)
        assert pair.decode.kinds(attempt) == ["admitted", "embedding", "finished"]
        (admitted, embedding) = (m for _, m in pair.decode.events[:2])
        assert not admitted.HasField("ticket")
        assert list(embedding.values) == pooled(prompt(40))
        assert (embedding.epoch, finished.epoch, finished.remote) == (EPOCH, EPOCH, False)
        phases = finished.phases
        assert phases.prefill_s > 0
        assert phases.transfer_s == 0
        await pair.at_rest()

    with_pair(test, engine=ENGINE)


def test_an_embedding_is_resent_to_a_session_that_missed_it(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(30), remote=False, pool=True)
        await pair.decode.wait("finished", attempt)
        await pair.decode.close()
        client = another(pair)
        ask_again(client, attempt)
        await client.wait("finished", attempt)
        assert client.kinds() == ["resumed", "embedding", "finished"]
        embedding = client.events[1][1]
        assert list(embedding.values) == pooled(prompt(30))
        assert embedding.epoch == EPOCH + 1
        await client.close()

    with_pair(test, engine=ENGINE)


def test_a_generating_model_refuses_embeddings(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(9), remote=False, pool=True)
        failed = await pair.decode.wait("failed", attempt)
        assert failed.failure.code == pb.INVALID_ARGUMENT
        assert "--pool last or mean" in failed.failure.message
        assert failed.failure.param == "model"

    with_pair(test)


def test_a_worker_embeds_and_generates(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        generation = pair.admit(prompt(9), remote=False)
        embedding = pair.admit(prompt(40), remote=False, pool=True)
        await pair.decode.wait("finished", generation)
        await pair.decode.wait("finished", embedding)
        (sent,) = [m for kind, m in pair.decode.events if kind == "embedding"]
        assert (sent.attempt, list(sent.values)) == (embedding, pooled(prompt(40)))
        assert "tokens" in pair.decode.kinds(generation)
        await pair.at_rest()

    with_pair(test, engine={"pool": "mean"})


def test_a_prompt_is_pooled_only_as_the_start_says(with_pair: Callable[..., None]) -> None:
    """A router of release 0.1 sends a Start to any worker of the model, and a gateway of that
    release names no pooling but expects an embedding.
    """
    cards: list[tuple[dict[str, Any], list[str]]] = [
        ({"pooling": "last"}, ["last", ""]),
        ({"pool": "mean"}, ["mean", ""]),
        ({"scores_pairs": True}, ["score"]),
        ({}, [""]),
    ]

    async def test(pair: Pair) -> None:
        assert pair.decode_worker.runtime is not None
        card = pair.decode_worker.runtime.hello.card
        for fields, expected in cards:
            for name in ("pooling", "pool", "scores_pairs"):
                card.ClearField(name)
            card.MergeFrom(pb.ModelCard(**fields))
            answered = []
            for pooling in ("last", "mean", "score", ""):
                attempt = pair.admit(prompt(9), remote=False, pool=True, pooling=pooling)
                await eventually(lambda a=attempt: (ENDS | {"busy"}) & {*pair.decode.kinds(a)})
                if "finished" in pair.decode.kinds(attempt):
                    answered.append(pooling)
                    continue
                await pair.decode.wait("busy", attempt)
            assert answered == expected
        await pair.at_rest()

    with_pair(test, engine=ENGINE)


def test_an_embedding_model_refuses_to_generate(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(9), remote=False)
        failed = await pair.decode.wait("failed", attempt)
        assert failed.failure.message == "The model does not support text generation"

    with_pair(test, engine=ENGINE)
