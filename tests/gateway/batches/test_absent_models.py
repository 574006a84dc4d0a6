"""Batch lines whose model is not served: when they wait for it, and when they fail."""

import asyncio

import pytest
from fakes.router import FakeRouter, saying, served
from systems.eventually import eventually
from systems.stored_gateway import (
    content_of,
    ended,
    holding_after,
    lines_of,
    start_batch,
    stored_gateway,
)

from pdserve.gateway.batches import run, runner
from pdserve.gateway.batches.run import MODEL_WAIT_S, STARTING_S, AbsentModels

pytestmark = pytest.mark.anyio


async def test_when_a_missing_model_is_given_up():
    used = {"used"}

    async def was_used(tenant: str, model: str) -> bool:
        return model in used

    begun = 1000.0
    starting = AbsentModels("", was_used, begun + STARTING_S)
    assert not await starting.gives_up("a", begun)
    assert not await starting.gives_up("a", begun + STARTING_S - 1)
    assert await starting.gives_up("a", begun + STARTING_S)
    settled = AbsentModels("", was_used, 0.0)
    for model in ("a", "used"):
        assert not await settled.gives_up(model, begun)
        assert not await settled.gives_up(model, begun + MODEL_WAIT_S - 1)
    assert await settled.gives_up("a", begun + MODEL_WAIT_S)
    assert await settled.gives_up("a", begun + MODEL_WAIT_S)
    assert not await settled.gives_up("used", begun + 86000)
    used.clear()  # its last answer was a day ago
    assert await settled.gives_up("used", begun + 86400)
    settled.found("a")
    assert not await settled.gives_up("a", begun + 86400)


async def test_an_unknown_model_is_awaited_and_then_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MODEL_WAIT_S", 0.4)
    monkeypatch.setattr(runner, "STARTING_S", 0.0)
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, lines_of(2, model="other")))
        errors = await content_of(client, batch.error_file_id)
        assert [line["response"]["status_code"] for line in errors] == [404, 404]
        assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"


async def test_an_empty_fleet_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MODEL_WAIT_S", 0.0)
    monkeypatch.setattr(runner, "STARTING_S", 0.0)
    card, blobs = served("tiny")
    router = FakeRouter(saying("hello"), [], blobs)
    async with stored_gateway(router, tmp_path) as gateway:
        client = gateway.client()
        batch_id = await start_batch(client, lines_of(3))
        await asyncio.sleep(1.0)
        assert (await client.batches.retrieve(batch_id)).status == "in_progress"
        router.cards.append(card)
        batch = await ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)


async def test_the_next_gateway_waits_for_a_model_that_is_still_loading(tmp_path, monkeypatch):
    """Wait because the previous gateway had answers from it, although the fleet already shows
    another model."""
    monkeypatch.setattr(run, "MODEL_WAIT_S", 0.1)
    monkeypatch.setattr(runner, "STARTING_S", 0.0)
    (small, blobs), (large, _) = served("tiny"), served("large")
    before = FakeRouter(holding_after(5, asyncio.Event()), [small, large], blobs)
    async with stored_gateway(before, tmp_path) as gateway:
        batch_id = await start_batch(gateway.client(), lines_of(12, model="large"))
        await eventually(lambda: len(before.starts) == 12)
        await gateway.stored.usage.flush()
    after = FakeRouter(saying("hello"), [small], blobs)
    async with stored_gateway(after, tmp_path) as gateway:
        client = gateway.client()
        wrong = await ended(client, await start_batch(client, lines_of(2, model="larje")))
        assert wrong.request_counts.failed == 2
        batch = await client.batches.retrieve(batch_id)
        assert (batch.status, batch.request_counts.failed) == ("in_progress", 0)
        after.cards.append(large)
        batch = await ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 12)
