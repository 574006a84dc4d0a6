"""Workers with other weights under one model name: never paired or resumed on, unless an option
allows it.

Runs the dispatcher without sockets, with time as a number.
"""

import logging
from typing import Any

import pytest
from systems.dispatcher_world import BLOCKS, NUMERICS, TOKENIZER, WEIGHTS, World

from pdserve.engine.kv import Mixing
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE, PREFILL
from pdserve.services.router.fleet import COMPATIBLE_WORKER_WAIT_S
from pdserve.services.router.main import make_rules
from pdserve.services.router.placement import Rules, WaitReason
from pdserve.services.router.settings import RouterSettings


@pytest.mark.parametrize(
    ("of_card", "of_hello", "what", "text"),
    [
        (WEIGHTS, {}, "weights", "weights aa (Q4_1) at decode, bb (Q8_0) at prefill"),
        (NUMERICS, {}, "numerics", "numerics id native/avx512 at decode, native/avx2 at prefill"),
        (TOKENIZER, {}, "tokenizer", "tokenizer 70 at decode, 71 at prefill"),
        (BLOCKS, {}, "layout", "block size 16 at decode, 32 at prefill"),
        ({}, {"wire_version": 3}, "wire version", "wire version 2 at decode, 3 at prefill"),
        ({}, {"transports": ["shm"]}, "transport", "transports tcp at decode, shm at prefill"),
        ({}, {"encrypt_kv": True}, "encryption", "KV encryption off at decode, on at prefill"),
    ],
)
def test_an_incompatible_pair_is_never_proposed(
    of_card: Any, of_hello: Any, what: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    world = World(Mixing())
    world.join(DECODE)
    world.join(PREFILL, of_hello, **of_card)
    for number in range(3):
        world.submit(f"r{number}")
    assert not any(admit.prefill_incarnation for _, admit in world.commands("admit"))
    assert len(world.commands("admit")) == 3
    assert world.dispatcher.placer.compatibility.incompatible == {what: 3}
    assert world.dispatcher.placer.reasons == {"no compatible prefill worker": 3}
    logged = [
        r.getMessage()
        for r in caplog.records
        if "cannot use KV of prefill worker" in r.getMessage()
    ]
    assert len(logged) == 1, "once for each pair"
    assert logged[0].endswith(text)
    good = world.join(PREFILL)
    world.submit("last")
    assert world.commands("admit")[-1][1].prefill_incarnation == good.incarnation


@pytest.mark.parametrize(
    ("mixing", "other", "paired"),
    [
        (Mixing(weights=True), WEIGHTS, True),
        (Mixing(weights=True), NUMERICS, False),
        (Mixing(numerics=True), NUMERICS, True),
        (Mixing(numerics=True), WEIGHTS, False),
        (Mixing(True, True), TOKENIZER, False),
        (Mixing(True, True), BLOCKS, False),
    ],
)
def test_mixing_pairs_the_allowed_kinds_and_counts_them(
    mixing: Mixing, other: Any, paired: bool
) -> None:
    world = World(mixing)
    world.join(DECODE)
    prefill = world.join(PREFILL, **other)
    world.submit("r")
    _, admit = world.commands("admit")[0]
    assert (admit.prefill_incarnation == prefill.incarnation) == paired
    decode = world.begin("r")
    if paired:
        _, start = world.commands("start")[0]
        assert start.kv_identity.digest == b"same"
        assert start.kv_identity.weights == "aa"
        done = wire.PrefillDone(attempt=admit.attempt)
        world.dispatcher.on_prefill(prefill, wire.PrefillEvent(done=done), world.now)
    world.finish(decode)
    assert world.dispatcher.placer.compatibility.inexact["hand-off"] == paired


@pytest.mark.parametrize("other", [WEIGHTS, NUMERICS, TOKENIZER])
def test_an_answer_is_not_resumed_on_another_identity(other: Any) -> None:
    """The request waits for a compatible worker, and continues when one joins; other requests do
    not wait for it.
    """
    world = World(Mixing(), "never")
    first = world.join(DECODE)
    world.submit("r")
    assert world.begin("r") is first
    stranger = world.join(DECODE, **other)
    world.die(first)
    world.pass_time(0.05)
    assert len(world.commands("admit")) == 1
    assert world.dispatcher.num_queued == 1
    world.submit("new")
    assert world.commands("admit")[-1][0] is stranger, (
        "a request that has not begun may go to any worker"
    )
    assert world.begin("new") is stranger
    same = world.join(DECODE)
    worker, admit = world.commands("admit")[-1]
    assert (worker, admit.start.request) == (same, "r")
    assert list(admit.start.choices[0].generated_ids) == [7]
    world.begin("r")
    assert not world.finish(same).inexact
    assert world.dispatcher.placer.compatibility.inexact == {}


def test_without_a_compatible_worker_a_request_ends_with_a_typed_error() -> None:
    world = World(Mixing(), "never")
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    world.join(DECODE, **WEIGHTS)
    world.die(first)
    world.pass_time(0.05)
    world.pass_time(COMPATIBLE_WORKER_WAIT_S - 1)
    assert world.events[-1].WhichOneof("event") == "tokens"
    world.pass_time(1.0)
    failed = world.events[-1].failed
    assert failed.failure.code == pb.UNAVAILABLE
    assert "weights that generated the beginning" in failed.failure.message
    assert world.dispatcher.num_queued == world.dispatcher.num_running == 0


def test_a_cancelled_request_is_forgotten() -> None:
    world = World(Mixing(), "never")
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    world.join(DECODE, **WEIGHTS)
    world.die(first)
    world.pass_time(0.05)
    waiting = world.dispatcher.placer.waiting
    assert waiting.num(WaitReason.COMPATIBLE_WORKER) == 1
    world.dispatcher.cancel(world, "r", (), world.now)
    assert not waiting.num(WaitReason.COMPATIBLE_WORKER)
    assert world.events[-1].failed.failure.code == pb.CANCELLED
    world.join(DECODE)
    assert len(world.commands("admit")) == 1


@pytest.mark.parametrize(
    ("mixing", "other", "resumed"),
    [
        (Mixing(weights=True), WEIGHTS, True),
        (Mixing(weights=True), NUMERICS, False),
        (Mixing(numerics=True), NUMERICS, True),
        (Mixing(numerics=True), WEIGHTS, False),
        (Mixing(True, True), TOKENIZER, False),
    ],
)
def test_mixing_resumes_the_allowed_kinds_and_marks_them(
    mixing: Mixing, other: Any, resumed: bool
) -> None:
    world = World(mixing, "never")
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    stranger = world.join(DECODE, **other)
    world.die(first)
    assert (world.commands("admit")[-1][0] is stranger) == resumed
    if resumed:
        world.begin("r")
        assert world.finish(stranger).inexact
    assert world.dispatcher.placer.compatibility.inexact["resume"] == resumed


def test_a_request_begun_by_another_router_is_bound_by_its_placement() -> None:
    world = World(Mixing(), "never")
    world.join(DECODE)
    world.submit("r")
    world.begin("r")
    (placed,) = [e.placed for e in world.events if e.WhichOneof("event") == "placed"]
    assert placed.placement.identity.weights == "aa"
    placed.placement.decode_incarnation = b"dead" * 4
    other = World(Mixing(), "never")
    other.join(DECODE, **WEIGHTS)
    state = pb.ChoiceState(generated_ids=[7])
    other.submit("r", epoch=1, placement=placed.placement, choices=[state])
    assert not other.commands("admit")
    same = other.join(DECODE)
    assert [worker for worker, _ in other.commands("admit")] == [same]
    # Nothing generated yet: it may begin on any worker.
    other.submit("s", epoch=1, placement=placed.placement)
    assert len(other.commands("admit")) == 2


def test_a_worker_with_another_numerics_id_continues_when_no_exact_one_remains() -> None:
    """The default: resume exactly while possible, inexactly otherwise."""
    world = World(Mixing(), "never", Rules().resuming)
    first = world.join(DECODE)
    world.submit("r")
    assert world.begin("r") is first
    stranger = world.join(DECODE, **NUMERICS)
    second = world.join(DECODE)
    world.leave(first)
    assert world.commands("admit")[-1][0] is second
    world.begin("r")
    world.leave(second)
    assert world.commands("admit")[-1][0] is stranger
    world.begin("r")
    assert world.finish(stranger).inexact
    assert world.dispatcher.placer.compatibility.inexact["resume"] == 1


@pytest.mark.parametrize("exact_only", [False, True])
def test_exact_only_ends_a_stream_instead(exact_only: bool) -> None:
    rules = make_rules(RouterSettings(exact_only=exact_only))
    world = World(rules.mixing, "never", rules.resuming)
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    stranger = world.join(DECODE, **NUMERICS)
    world.leave(first)
    if exact_only:
        world.pass_time(COMPATIBLE_WORKER_WAIT_S + 1)
        assert len(world.commands("admit")) == 1
        assert world.events[-1].failed.failure.code == pb.UNAVAILABLE
    else:
        assert world.commands("admit")[-1][0] is stranger


def test_a_busy_exact_worker_is_waited_for() -> None:
    world = World(Mixing(), "never", Rules().resuming)
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    second = world.join(DECODE)
    world.join(DECODE, **NUMERICS)
    second.busy_until = world.now + 0.2
    world.die(first)
    assert len(world.commands("admit")) == 1
    world.pass_time(0.3)
    assert world.commands("admit")[-1][0] is second
