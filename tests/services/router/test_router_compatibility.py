"""Workers of other weights under one name: never paired, never resumed on, unless that is allowed.

The dispatcher without sockets, time as a number.
"""

import logging
from random import Random
from typing import Any

import pytest

from pdserve.engine.kv.codec import encode_spec
from pdserve.engine.kv.identity import KvIdentity, Mixing
from pdserve.engine.kv.spec import KvSpec, LayerGroup
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE, PREFILL
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.host.rpc.request_progress import RequestProgress
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.fleet.compatibility import STRANDED_S
from pdserve.services.router.fleet.fleet import Fleet, Worker
from pdserve.services.router.main import make_rules
from pdserve.services.router.placement.policy import Rules
from pdserve.services.router.placement.waiting import WaitReason
from pdserve.services.router.settings import RouterSettings

GROUP = LayerGroup((0,), "full", 0, 1, 64, "bfloat16", 0, 1)
SAME = KvIdentity(b"same", "aa", "Q4_1", "cc", "70", "bfloat16", "native/avx512")
CARD: dict[str, Any] = {
    "name": "m",
    "kv_identity": pb.KvIdentity(**SAME.parts()),
    "kv_spec": encode_spec(KvSpec(16, (GROUP,))),
}


def other(**parts: Any) -> dict[str, Any]:
    """A card of another identity."""
    return {"kv_identity": pb.KvIdentity(**(SAME.parts() | parts))}


WEIGHTS = other(digest=b"weights", weights="bb", quantization="Q8_0")
NUMERICS = other(digest=b"numerics", numerics="native/avx2")
TOKENIZER = other(tokenizer="71")
BLOCKS = {"kv_spec": encode_spec(KvSpec(32, (GROUP,)))}


class World:
    """A dispatcher, its workers as names, and the one client."""

    key = b"gateway"

    def __init__(
        self, mixing: Mixing, prefill: str = "always", resuming: Mixing | None = None
    ) -> None:
        self.now = 100.0
        self.fleet = Fleet()
        self.events: list[RequestEvent] = []
        self.sent: list[tuple[Worker, Any]] = []
        self.num_joined = 0
        rules = Rules(prefill, 10, mixing=mixing, resuming=resuming or mixing)
        self.dispatcher = Dispatcher(self.fleet, rules, self._send, Random(1), 5, 0.0)

    def put(self, event: RequestEvent) -> None:
        self.events.append(event)

    def _send(self, worker: Worker, command: Any) -> None:
        self.sent.append((worker, command))

    def join(self, role: fleet_pb2.Role, of_hello: Any = None, **card: Any) -> Worker:
        self.num_joined += 1
        number = self.num_joined
        fields = {"transports": ["tcp"], "wire_version": 2} | (of_hello or {})
        hello = fleet_pb2.WorkerHello(
            role=role,
            boot=number.to_bytes(16),
            address=f"10.0.0.{number}:1",
            card=pb.ModelCard(**(CARD | card)),
            **fields,
        )
        worker, _ = self.fleet.join(hello, self.now)
        self.dispatcher.joined(worker)
        self.dispatcher.connected(worker, self.now)
        return worker

    def submit(self, request: str, **start: Any) -> None:
        start |= {"cache_salt": request.encode()}  # nobody waits for the KV of another
        message = pb.Start(request=request, model="m", params=pb.SamplingParams(n=1), **start)
        self.dispatcher.submit(RequestProgress(message, list(range(40))), self, self.now)

    def commands(self, kind: str) -> list[tuple[Worker, Any]]:
        return [(w, getattr(c, kind)) for w, c in self.sent if c.WhichOneof("command") == kind]

    def begin(self, request: str) -> Worker:
        """The last Admit is of that request; admit it, and generate a token."""
        worker, admit = self.commands("admit")[-1]
        assert admit.start.request == request
        ticket = wire.Ticket(id=b"t") if admit.prefill_boot else None
        admitted = wire.Admitted(attempt=admit.attempt, ticket=ticket)
        self.dispatcher.on_decode(worker, wire.DecodeEvent(admitted=admitted), self.now)
        position = len(admit.start.choices[0].generated_ids) if admit.start.choices else 0
        tokens = pb.Tokens(attempt=admit.attempt, position=position, ids=[7])
        self.dispatcher.on_decode(worker, wire.DecodeEvent(tokens=tokens), self.now)
        return worker

    def finish(self, worker: Worker) -> pb.Finished:
        _, admit = self.commands("admit")[-1]
        finished = pb.Finished(attempt=admit.attempt)
        self.dispatcher.on_decode(worker, wire.DecodeEvent(finished=finished), self.now)
        return self.events[-1].finished

    def die(self, worker: Worker) -> None:
        self.fleet.lost(worker)
        self.dispatcher.disconnected(worker, True, self.now)

    def leave(self, worker: Worker) -> None:
        """It says goodbye, and ends."""
        worker.said_goodbye = True
        self.fleet.lost(worker)
        self.dispatcher.disconnected(worker, False, self.now)
        self.pass_time(0.05)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.fleet.workers.values():
            self.fleet.heard(worker, self.now)
        self.dispatcher.tick(self.now)


@pytest.mark.parametrize(
    ("of_card", "of_hello", "what", "text"),
    [
        (WEIGHTS, {}, "weights", "weights aa (Q4_1) here, bb (Q8_0) there"),
        (NUMERICS, {}, "numerics", "numerics id native/avx512 here, native/avx2 there"),
        (TOKENIZER, {}, "tokenizer", "tokenizer 70 here, 71 there"),
        (BLOCKS, {}, "layout", "block size 16 here, 32 there"),
        ({}, {"wire_version": 3}, "wire version", "wire version 2 here, 3 there"),
        ({}, {"transports": ["shm"]}, "transport", "transports tcp here, shm there"),
        ({}, {"encrypt_kv": True}, "encryption", "KV encryption: not here, encrypted there"),
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
    assert not any(admit.prefill_boot for _, admit in world.commands("admit"))
    assert len(world.commands("admit")) == 3
    assert world.dispatcher.placer.compatibility.incompatible == {what: 3}
    assert world.dispatcher.placer.reasons == {"no compatible prefill worker": 3}
    logged = [r.getMessage() for r in caplog.records if "is not paired with" in r.getMessage()]
    assert len(logged) == 1, "once for each pair"
    assert logged[0].endswith(text)
    good = world.join(PREFILL)
    world.submit("last")
    assert world.commands("admit")[-1][1].prefill_boot == good.boot


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
def test_mixing_pairs_what_it_says_and_counts_it(mixing: Mixing, other: Any, paired: bool) -> None:
    world = World(mixing)
    world.join(DECODE)
    prefill = world.join(PREFILL, **other)
    world.submit("r")
    _, admit = world.commands("admit")[0]
    assert (admit.prefill_boot == prefill.boot) == paired
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
    """It waits for a compatible worker, and goes on when one joins; others do not wait for it."""
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
    assert world.commands("admit")[-1][0] is stranger, "what has not begun may go anywhere"
    assert world.begin("new") is stranger
    same = world.join(DECODE)
    worker, admit = world.commands("admit")[-1]
    assert (worker, admit.start.request) == (same, "r")
    assert list(admit.start.choices[0].generated_ids) == [7]
    world.begin("r")
    assert not world.finish(same).inexact
    assert world.dispatcher.placer.compatibility.inexact == {}


def test_without_a_compatible_worker_it_ends_with_a_typed_error() -> None:
    world = World(Mixing(), "never")
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    world.join(DECODE, **WEIGHTS)
    world.die(first)
    world.pass_time(0.05)
    world.pass_time(STRANDED_S - 1)
    assert world.events[-1].WhichOneof("event") == "tokens"
    world.pass_time(1.0)
    failed = world.events[-1].failed
    assert failed.failure.code == pb.UNAVAILABLE
    assert "weights that began this answer" in failed.failure.message
    assert world.dispatcher.num_queued == world.dispatcher.num_running == 0


def test_a_cancelled_one_is_forgotten() -> None:
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
def test_mixing_resumes_what_it_says_and_marks_it(
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


def test_a_request_that_another_router_began_is_bound_by_its_placement() -> None:
    world = World(Mixing(), "never")
    world.join(DECODE)
    world.submit("r")
    world.begin("r")
    (placed,) = [e.placed for e in world.events if e.WhichOneof("event") == "placed"]
    assert placed.placement.identity.weights == "aa"
    placed.placement.decode_boot = b"dead" * 4
    other = World(Mixing(), "never")
    other.join(DECODE, **WEIGHTS)
    state = pb.ChoiceState(generated_ids=[7])
    other.submit("r", epoch=1, placement=placed.placement, choices=[state])
    assert not other.commands("admit")
    same = other.join(DECODE)
    assert [worker for worker, _ in other.commands("admit")] == [same]
    # Nothing generated yet: it may begin anywhere.
    other.submit("s", epoch=1, placement=placed.placement)
    assert len(other.commands("admit")) == 2


def test_another_numerics_id_goes_on_when_no_exact_worker_is_left() -> None:
    """By default: exactly while it can be, inexactly rather than not at all."""
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
        world.pass_time(STRANDED_S + 1)
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


def test_weights_that_were_withdrawn_are_not_waited_for() -> None:
    """The pool left in order and other weights have its name: nobody will go on with it."""
    world = World(Mixing(), "never", Rules().resuming)
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    world.join(DECODE, **WEIGHTS)
    world.leave(first)
    world.pass_time(0.05)
    failed = world.events[-1].failed
    assert failed.failure.code == pb.UNAVAILABLE
    assert "weights that began this answer" in failed.failure.message
    back = world.join(DECODE)
    world.submit("s")
    world.submit("t")
    world.die(back)
    world.pass_time(0.05)
    assert world.events[-1].WhichOneof("event") != "failed", "it may start again"


def test_the_successor_of_the_only_worker_is_waited_for_a_while() -> None:
    """It may be a restart; if no worker of the model comes, the answer ends."""
    world = World(Mixing(), "never", Rules().resuming)
    first = world.join(DECODE)
    world.submit("r")
    world.begin("r")
    world.leave(first)
    world.pass_time(STRANDED_S - 1)
    back = world.join(DECODE)
    assert world.begin("r") is back
    world.leave(back)
    world.pass_time(STRANDED_S - 1)
    assert not world.events[-1].HasField("failed")
    world.pass_time(1.0)
    failed = world.events[-1].failed
    assert failed.failure.code == pb.UNAVAILABLE
    assert "weights that began this answer" in failed.failure.message


def test_a_crashed_worker_of_withdrawn_weights_may_come_back() -> None:
    world = World(Mixing(), "never", Rules().resuming)
    crashes, drains = world.join(DECODE), world.join(DECODE)
    crashes.busy_until = world.now + 1.0
    world.submit("r")
    assert world.begin("r") is drains
    world.join(DECODE, **WEIGHTS)
    world.die(crashes)
    world.leave(drains)
    assert not world.events[-1].HasField("failed")
    world.pass_time(STRANDED_S / 2)
    back = world.join(DECODE)
    assert world.commands("admit")[-1][0] is back


def test_withdrawn_weights_are_given_up_when_no_crashed_worker_came_back() -> None:
    world = World(Mixing(), "never", Rules().resuming)
    crashes, drains = world.join(DECODE), world.join(DECODE)
    crashes.busy_until = world.now + 1.0
    world.submit("r")
    assert world.begin("r") is drains
    world.die(crashes)
    world.join(DECODE, **WEIGHTS)
    world.pass_time(STRANDED_S - 1)
    world.leave(drains)
    assert not world.events[-1].HasField("failed")
    world.pass_time(1.0)
    assert world.events[-1].failed.failure.code == pb.UNAVAILABLE


def test_tenants_take_turns_at_the_recompute_budget() -> None:
    world = World(Mixing(), "never")
    first = world.join(DECODE)
    for request in ("a1", "a2", "a3", "b1"):
        world.submit(request, tenant=request[:1].encode())
        world.begin(request)
    world.die(first)
    world.join(DECODE)
    for _ in range(3):
        world.begin(world.commands("admit")[-1][1].start.request)
        world.pass_time(0.05)
    order = [admit.start.request for _, admit in world.commands("admit")[4:]]
    assert "b1" in order[:2], "not behind all of the other tenant"
    assert [request for request in order if request != "b1"] == ["a1", "a2", "a3"]
