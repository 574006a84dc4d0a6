"""Workers of one model name with different tokenizers: no prompt is read with the ids of
another.
"""

import asyncio
from typing import Any

import pytest
from systems.dispatcher_world import CARD, NUMERICS, SAME, TOKENIZER, World, other

from pdserve.engine.kv import Mixing
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import DECODE, WorkerHello
from pdserve.services.router.fleet import COMPATIBLE_WORKER_WAIT_S

OLD, NEW = SAME.tokenizer, "71"


def world_of(*cards: dict[str, Any]) -> World:
    world = World(Mixing(), "never")
    for card in cards:
        world.join(DECODE, **card)
    return world


def tokenizers_of(world: World) -> list[str]:
    """Return the tokenizers of the workers with Admits, in order."""
    return [worker.identity.tokenizer for worker, _ in world.commands("admit")]


@pytest.mark.parametrize("tokenizer", [OLD, NEW])
def test_a_prompt_goes_to_workers_of_its_tokenizer(tokenizer: str) -> None:
    world = world_of({}, TOKENIZER)
    for number in range(8):
        world.submit(f"r{number}", tokenizer=tokenizer)
    assert tokenizers_of(world) == [tokenizer] * 8


def test_workers_and_prompts_without_a_known_tokenizer_match_any() -> None:
    world = world_of(other(tokenizer=""))
    world.submit("r", tokenizer=NEW)
    assert tokenizers_of(world) == [""]
    world = world_of({})
    world.submit("r")
    assert tokenizers_of(world) == [OLD]


def test_the_client_must_encode_the_prompt_again() -> None:
    world = world_of({}, TOKENIZER)
    old = next(w for w in world.fleet.workers.values() if w.identity.tokenizer == OLD)
    world.fleet.deregister(old)
    world.submit("late", tokenizer=OLD)
    failure = world.events[-1].failed.failure
    assert (failure.code, failure.retry_after_ms) == (pb.UNAVAILABLE, 1000)
    assert "tokenizer has changed" in failure.message
    world.submit("read again", tokenizer=NEW)
    assert tokenizers_of(world) == [NEW]


def test_a_request_that_waits_for_leaving_workers_delays_no_other() -> None:
    world = world_of({}, TOKENIZER)
    old, new = world.fleet.workers.values()
    old.busy_until = new.busy_until = world.now + 1.0
    world.submit("first", tokenizer=OLD)
    world.submit("second", tokenizer=NEW)
    assert not tokenizers_of(world)
    world.fleet.deregister(old)
    world.pass_time(1.0)
    assert tokenizers_of(world) == [NEW]
    world.pass_time(COMPATIBLE_WORKER_WAIT_S + 1.0)
    failed = [e.failed for e in world.events if e.HasField("failed")]
    assert [f.request for f in failed] == ["first"]
    assert "tokenizer that tokenized the prompt" in failed[0].failure.message


@pytest.mark.parametrize("busy", [OLD, NEW])
def test_a_busy_pool_delays_no_other(busy: str) -> None:
    """Its workers refuse for long, while those of the other tokenizer are idle."""
    idle = NEW if busy == OLD else OLD
    world = world_of({}, TOKENIZER)
    for worker in world.fleet.workers.values():
        if worker.identity.tokenizer == busy:
            worker.busy_until = world.now + 60.0
    world.submit("first", tokenizer=busy)
    world.submit("second", tokenizer=idle)
    world.pass_time(1.0)
    assert tokenizers_of(world) == [idle]


def test_prompts_of_no_known_tokenizer_take_turns_with_the_others() -> None:
    """They may go to the same workers, so a new prompt queues behind a waiting one."""
    world = world_of({})
    (worker,) = world.fleet.workers.values()
    worker.busy_until = world.now + 1.0
    world.submit("first", tokenizer=OLD)
    worker.busy_until = 0.0
    world.submit("second")
    requests = [admit.start.request for _, admit in world.commands("admit")]
    assert requests != ["second"]
    world.pass_time(1.0)
    requests = [admit.start.request for _, admit in world.commands("admit")]
    assert sorted(requests) == ["first", "second"]


def test_a_leaving_pool_without_a_replacement_is_waited_for() -> None:
    """The departure may be a restart: no other worker serves the model."""
    world = world_of({})
    (old,) = world.fleet.workers.values()
    world.fleet.deregister(old)
    world.submit("r", tokenizer=OLD)
    world.leave(old)
    world.pass_time(1.0)
    assert not world.events or not world.events[-1].HasField("failed")
    world.join(DECODE)
    assert tokenizers_of(world) == [OLD]


@pytest.mark.anyio
async def test_the_card_comes_from_the_larger_pool(make_cluster: Any) -> None:
    core = (await make_cluster()).router.core

    def join(card: dict[str, Any]) -> str:
        number = 1 + len(core.fleet.workers)
        made = pb.ModelCard(**(CARD | card))
        hello = WorkerHello(
            role=DECODE, incarnation=bytes([number]) * 16, address=f"10.0.0.1:{number}"
        )
        hello.card.CopyFrom(made)
        core.fleet.join(hello, asyncio.get_running_loop().time())
        (found,) = core.models()
        return found.kv_identity.tokenizer

    assert [join(card) for card in ({}, NUMERICS)] == [OLD, OLD]
    assert [join(TOKENIZER) for _ in range(2)] == [OLD, NEW], "the newest of equal ones"
    assert join({}) == OLD
