"""Embeddings through a real router to fake workers: one for each request, whichever worker dies."""

from typing import Any

import pytest

from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
LONG = list(range(600))
VALUES = [0.0, 600.0]


async def test_an_embedding_stays_local_and_comes_before_the_end(make_cluster: Any) -> None:
    cluster = await make_cluster(remote_prefill="always")
    await cluster.decode()
    prefill = await cluster.prefill()
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True)
    finished = await gateway.end("r")
    assert isinstance(finished, pb.Finished)
    assert not finished.remote
    kinds = [event.WhichOneof("event") for event in gateway.events["r"]]
    assert kinds == ["placed", "embedding", "finished"]
    (embedding,) = gateway.of("r", "embedding")
    assert list(embedding.values) == VALUES
    assert not prefill.ids
    assert cluster.router.core.view().prefill_local == 1


@pytest.mark.parametrize("said", [False, True], ids=["before it is said", "after it was said"])
async def test_a_worker_that_dies(make_cluster: Any, said: bool) -> None:
    cluster = await make_cluster()
    dying = await cluster.decode()
    dying.hold_at = int(said)
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True)
    await dying.until(lambda: bool(dying.said))
    if said:
        await gateway.until(lambda: bool(gateway.of("r", "embedding")))
    other = await cluster.decode()
    await dying.kill()
    assert isinstance(await gateway.end("r"), pb.Finished)
    (embedding,) = gateway.of("r", "embedding")
    assert list(embedding.values) == VALUES
    assert len(other.of("admit")) == int(not said), "it is computed again only if it was lost"
    assert cluster.router.core.dispatcher.num_running == 0


async def test_an_embedding_is_delivered_once_over_a_broken_session(make_cluster: Any) -> None:
    cluster = await make_cluster()
    decode = await cluster.decode()
    decode.hold_at = 1
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True)
    await gateway.until(lambda: bool(gateway.of("r", "embedding")))
    decode.outboxes[-1].close()
    await decode.until(lambda: bool(decode.of("resume")))
    decode.released.set()
    assert isinstance(await gateway.end("r"), pb.Finished)
    assert len(gateway.of("r", "embedding")) == 1
    assert len(decode.of("admit")) == 1


async def test_several_choices_are_refused(make_cluster: Any) -> None:
    cluster = await make_cluster()
    await cluster.decode()
    gateway = await cluster.gateway()
    await gateway.start("r", LONG, pool=True, n=2)
    failed = await gateway.end("r")
    assert failed.failure.code == pb.INVALID_ARGUMENT
    assert failed.failure.param == "n"
