"""The fleet's state machine, under any sequence of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from pdserve.engine.kv import KvSpec, encode_spec
from pdserve.protos import fleet_pb2 as pb
from pdserve.protos.common_pb2 import ModelCard
from pdserve.services.common.stall_detector import FROZEN_S
from pdserve.services.router.fleet import Fleet, State, Worker, taking_work
from pdserve.services.router.fleet.fleet import ISOLATED_S, RESUMED_S, SILENCE_S, SUSPECT_S
from pdserve.services.router.fleet.worker import UNREPORTED_S


def hello(name: int, life: int = 0) -> pb.WorkerHello:
    return pb.WorkerHello(
        role=pb.DECODE,
        incarnation=bytes([name, life]) * 8,
        address=f"10.0.0.{name}:1",
        card=ModelCard(kv_spec=encode_spec(KvSpec(16, ()))),
    )


def joined(now: float = 0.0) -> tuple[Fleet, Worker]:
    fleet = Fleet()
    return fleet, fleet.join(hello(1), now)[0]


def test_silence_makes_a_worker_suspect_then_dead() -> None:
    fleet, worker = joined()
    assert fleet.tick(SILENCE_S - 0.01) == []
    assert worker.state is State.LIVE
    assert fleet.tick(SILENCE_S) == []
    assert worker.state is State.SUSPECT
    assert fleet.tick(SILENCE_S + SUSPECT_S - 0.01) == []
    assert fleet.tick(SILENCE_S + SUSPECT_S) == [worker]
    assert not fleet.workers


def test_a_worker_heard_again_is_as_before() -> None:
    fleet, worker = joined()
    fleet.stream_ended(worker, worker.lease, 0.1)
    assert worker.state is State.SUSPECT
    again, dead = fleet.join(hello(1), 0.3)
    assert (again, dead, worker.state) == (worker, [], State.LIVE)
    assert fleet.tick(0.3 + SILENCE_S - 0.01) == []


def test_a_worker_that_leaves_only_this_router_is_live_again_when_it_joins() -> None:
    fleet, worker = joined()
    worker.connected = True
    fleet.deregister(worker, leaves=True)
    assert (worker.state, worker.stays, worker.draining) == (State.LEAVING, False, False)
    assert fleet.stream_ended(worker, worker.lease, 0.1) == []
    assert fleet.tick(60.0) == []
    assert worker.state is State.LEAVING, "its session reports what still runs there"
    again, dead = fleet.join(hello(1), 60.2)
    assert (again, dead, worker.state, worker.stays) == (worker, [], State.LIVE, True)


def test_a_worker_that_has_left_is_dead_when_its_session_ends() -> None:
    fleet, worker = joined()
    worker.connected = True
    fleet.deregister(worker, leaves=True)
    fleet.stream_ended(worker, worker.lease, 0.1)
    worker.connected = False
    assert fleet.tick(60.0) == []
    assert fleet.tick(60.0 + SUSPECT_S) == [worker]


def test_a_fleet_is_sharded_as_long_as_a_decode_worker_has_joined_some_routers() -> None:
    fleet = Fleet()
    assert not fleet.sharded
    some, all_ = hello(1), hello(2)
    some.role = all_.role = pb.DECODE
    some.join_routers = 2
    first, _ = fleet.join(some, 0.0)
    second, _ = fleet.join(all_, 0.0)
    assert fleet.sharded
    fleet.lost(second)
    fleet.lost(first)
    assert fleet.sharded, "as far as is known"
    fleet.join(all_, 1.0)
    assert not fleet.sharded


def test_a_worker_that_leaves_may_freeze_and_drain() -> None:
    fleet, worker = joined()
    fleet.deregister(worker, leaves=True)
    for beat in range(100):
        fleet.beat(worker, pb.Heartbeat(step=1, busy=True), beat * 0.1)
    assert worker.state is State.FROZEN
    fleet.beat(worker, pb.Heartbeat(step=2, busy=True), 10.0)
    assert worker.state is State.LEAVING
    fleet.deregister(worker)
    assert worker.state is State.DRAINING


def test_a_witness_saves_a_suspect_from_death_but_not_from_suspicion() -> None:
    fleet, worker = joined()
    fleet.stream_ended(worker, worker.lease, 0.0)
    for step in range(1, 20):
        fleet.witnessed(worker, step * 0.4)
        assert fleet.tick(step * 0.4 + 0.1) == []
        assert worker.state is State.SUSPECT
    assert fleet.tick(19 * 0.4 + SUSPECT_S) == [worker]


def test_the_end_of_an_old_stream_of_a_rejoined_worker_is_ignored() -> None:
    fleet, worker = joined()
    old = worker.lease
    fleet.join(hello(1), 0.2)
    assert fleet.stream_ended(worker, old, 0.3) == []
    assert worker.state is State.LIVE


def test_a_new_incarnation_on_the_same_address_ends_the_old_worker() -> None:
    fleet, worker = joined()
    new, dead = fleet.join(hello(1, life=1), 0.2)
    assert dead == [worker]
    assert list(fleet.workers.values()) == [new]


def test_deregistered_then_gone() -> None:
    fleet, worker = joined()
    fleet.deregister(worker)
    assert worker.state is State.DRAINING
    assert fleet.stream_ended(worker, worker.lease, 0.1) == [worker]


def test_a_frozen_engine_gets_no_work_until_it_moves() -> None:
    fleet, worker = joined()
    worker.connected = True
    now, said = 0.0, list[float]()
    while not said:
        now += 0.1
        if fleet.beat(worker, pb.Heartbeat(step=7, busy=True), now):
            said.append(now)
        fleet.heard(worker, now)
        assert fleet.tick(now) == []
    assert FROZEN_S <= now <= 10.0
    assert (worker.state, taking_work([worker], now)) == (State.FROZEN, [])
    fleet.stream_ended(worker, worker.lease, now)
    assert worker.state is State.SUSPECT
    fleet.join(hello(1), now + 0.2)
    assert worker.state is State.FROZEN, "heard again, and nothing else has changed"
    assert not fleet.beat(worker, pb.Heartbeat(step=7, busy=True), now + 0.3)
    assert fleet.beat(worker, pb.Heartbeat(step=8, busy=True), now + 0.4)
    assert (worker.state, taking_work([worker], now)) == (State.LIVE, [worker])


def test_a_frozen_worker_that_drains_keeps_draining() -> None:
    fleet, worker = joined()
    fleet.deregister(worker)
    assert worker.state is State.DRAINING
    for beat in range(100):
        fleet.beat(worker, pb.Heartbeat(step=7, busy=True), beat * 0.1)
    assert worker.state is State.FROZEN
    fleet.beat(worker, pb.Heartbeat(step=7), 10.0)
    assert worker.state is State.DRAINING
    assert fleet.stream_ended(worker, worker.lease, 10.1) == [worker]


def test_deregistered_then_gone_while_its_last_messages_are_in_flight() -> None:
    fleet, worker = joined()
    worker.connected = True
    fleet.deregister(worker)
    assert fleet.stream_ended(worker, worker.lease, 0.1) == []
    fleet.witnessed(worker, 0.4)
    assert fleet.tick(0.8) == []
    assert fleet.tick(0.4 + SUSPECT_S) == [worker]


def expected(worker: Worker) -> tuple[int, int]:
    return worker.facts.requests, worker.facts.waiting_tokens


def test_a_router_s_commands_count_until_a_load_includes_them() -> None:
    _, worker = joined()
    worker.report(pb.Load(running=2, waiting_tokens=100))
    for name, tokens in ((b"a", 10), (b"b", 20), (b"c", 30)):
        worker.commanded(name, tokens, 0.0)
    assert expected(worker) == (5, 160)
    worker.report(pb.Load(running=4, waiting_tokens=130, last_command=b"b"))
    assert expected(worker) == (5, 160)
    worker.report(pb.Load(running=4, waiting_tokens=130, last_command=b"of another router"))
    worker.forget_old_commands(UNREPORTED_S - 0.1)
    assert expected(worker) == (5, 160)
    worker.forget_old_commands(UNREPORTED_S)
    assert expected(worker) == (4, 130)


def test_a_repeated_command_counts_once_from_its_last_time() -> None:
    """For example a prompt's command, when it is sent to the prefill worker after all."""
    _, worker = joined()
    for name, tokens, at in ((b"a", 10, 0.0), (b"b", 20, 0.1), (b"a", 5, 0.2)):
        worker.commanded(name, tokens, at)
    assert expected(worker) == (2, 25)
    worker.report(pb.Load(last_command=b"b"))
    assert expected(worker) == (1, 5), "a was sent after it"
    worker.forget_old_commands(0.1 + UNREPORTED_S)
    assert expected(worker) == (1, 5)
    worker.forget_old_commands(0.2 + UNREPORTED_S)
    assert expected(worker) == (0, 0)
    worker.forget_command(b"a")
    assert expected(worker) == (0, 0)


class FleetMachine(RuleBasedStateMachine):
    """Any order of events; a model of a few lines computes the expected workers."""

    lives = Bundle("lives")

    @initialize()
    def begin(self) -> None:
        self.fleet = Fleet()
        self.now = 0.0
        self.dead: list[Worker] = []

    @rule(target=lives, name=st.integers(1, 3), life=st.integers(0, 2))
    def join(self, name: int, life: int) -> Worker:
        worker, dead = self.fleet.join(hello(name, life), self.now)
        self.dead += dead
        assert worker.state in (State.LIVE, State.DRAINING, State.FROZEN)
        return worker

    @rule(worker=lives)
    def hear(self, worker: Worker) -> None:
        if self.fleet.get(worker.incarnation) is worker:
            self.fleet.heard(worker, self.now)
            assert worker.state is not State.SUSPECT

    @rule(worker=lives, step=st.integers(0, 1), busy=st.booleans(), beats=st.integers(1, 100))
    def beat(self, worker: Worker, step: int, busy: bool, beats: int) -> None:
        for _ in range(beats):
            if self.fleet.get(worker.incarnation) is not worker:
                return
            self.now += 0.1
            self.fleet.heard(worker, self.now)
            turned = self.fleet.beat(worker, pb.Heartbeat(step=step, busy=busy), self.now)
            assert (worker.state is State.FROZEN) == worker.frozen
            assert not (turned and worker.frozen and not busy)
            self.dead += self.fleet.tick(self.now)

    @rule(worker=lives)
    def witness(self, worker: Worker) -> None:
        before = worker.state
        self.fleet.witnessed(worker, self.now)
        assert worker.state is before

    @rule(worker=lives)
    def end_stream(self, worker: Worker) -> None:
        self.dead += self.fleet.stream_ended(worker, worker.lease, self.now)

    @rule(worker=lives, leaves=st.booleans())
    def deregister(self, worker: Worker, leaves: bool) -> None:
        self.fleet.deregister(worker, leaves)
        assert not taking_work([worker], self.now)
        assert not worker.stays

    @rule(worker=lives)
    def refuse(self, worker: Worker) -> None:
        self.dead += self.fleet.lost(worker)

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.6, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.dead += self.fleet.tick(self.now)

    @invariant()
    def one_life_per_address_and_each_dies_once(self) -> None:
        if not hasattr(self, "fleet"):
            return
        addresses = [w.hello.address for w in self.fleet.workers.values()]
        assert len(addresses) == len(set(addresses))
        assert len({id(w) for w in self.dead}) == len(self.dead)
        assert not {id(w) for w in self.dead} & {id(w) for w in self.fleet.workers.values()}


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=30)


def several(num: int) -> tuple[Fleet, list[Worker]]:
    fleet = Fleet()
    workers = [fleet.join(hello(name), 0.0)[0] for name in range(1, num + 1)]
    for worker in workers:
        worker.was_connected = True
    return fleet, workers


def test_time_stood_still_counts_as_silence_of_no_worker() -> None:
    fleet, workers = several(4)
    fleet.stream_ended(workers[0], workers[0].lease, 0.1)
    fleet.excuse(30.0, 30.2)
    assert fleet.tick(30.2) == []
    assert [w.state for w in workers] == [State.SUSPECT, *[State.LIVE] * 3]
    assert not fleet.isolated
    assert fleet.tick(30.1 + SUSPECT_S) == workers[:1], "its time continues where it stood"
    for worker in workers[1:]:
        fleet.heard(worker, 30.2)
    assert fleet.tick(30.2 + SILENCE_S - 0.01) == []


def test_a_router_that_hears_from_no_worker_suspects_itself() -> None:
    fleet, workers = several(4)
    fleet.heard(workers[0], SILENCE_S)
    assert fleet.tick(SILENCE_S) == []
    assert fleet.isolated
    assert fleet.tick(SILENCE_S + 3 * SUSPECT_S) == [], "no worker dies of silence"
    assert fleet.lost(workers[1]) == [workers[1]], (
        "a port that refuses is evidence of one worker's death"
    )
    now = SILENCE_S + 4 * SUSPECT_S
    for worker in (workers[0], workers[2], workers[3]):
        fleet.heard(worker, now)
    assert fleet.tick(now) == []
    assert not fleet.isolated
    assert [w.state for w in fleet.workers.values()] == [State.LIVE] * 3


def test_workers_heard_last_get_their_full_time() -> None:
    fleet, workers = several(4)
    fleet.tick(SILENCE_S)
    now = SILENCE_S + 4 * SUSPECT_S
    for worker in workers[:2]:
        fleet.heard(worker, now)
    assert fleet.tick(now) == []
    assert not fleet.isolated
    for worker in workers[:2]:
        fleet.heard(worker, now + SUSPECT_S)
    assert fleet.tick(now + SUSPECT_S / 2) == []
    assert fleet.tick(now + SUSPECT_S) == workers[2:]


def test_a_router_does_not_suspect_itself_forever() -> None:
    fleet, workers = several(4)
    fleet.tick(SILENCE_S)
    assert fleet.isolated
    assert fleet.tick(SILENCE_S + ISOLATED_S - 0.01) == []
    assert fleet.tick(SILENCE_S + ISOLATED_S) == workers
    fleet.tick(SILENCE_S + ISOLATED_S)
    assert not fleet.isolated


def test_time_stood_still_in_isolation_does_not_count() -> None:
    fleet, _ = several(4)
    fleet.tick(SILENCE_S)
    assert fleet.isolated
    now = SILENCE_S + 2 * ISOLATED_S
    fleet.excuse(2 * ISOLATED_S, now)
    assert fleet.tick(now) == []
    assert fleet.isolated
    assert len(fleet.tick(now + ISOLATED_S)) == 4


def test_new_requests_are_accepted_while_workers_join_again_after_a_pause() -> None:
    fleet, workers = several(4)
    now = 100.0
    fleet.excuse(10.0, now)
    for worker in workers:
        fleet.stream_ended(worker, worker.lease, now)
    fleet.tick(now)
    assert fleet.isolated
    assert not fleet.refuses(now)
    assert fleet.refuses(now + RESUMED_S)


def test_half_of_the_workers_may_be_dead() -> None:
    for num, heard in ((4, 2), (3, 0)):
        fleet, workers = several(num)
        for worker in workers[:heard]:
            fleet.heard(worker, SILENCE_S)
        fleet.tick(SILENCE_S)
        assert not fleet.isolated
        assert fleet.tick(SILENCE_S + SUSPECT_S) == workers[heard:]


def test_hellos_without_a_worker_are_not_counted() -> None:
    fleet, workers = several(4)
    for number in range(10, 20):
        fleet.join(hello(number), 0.0)
    for worker in workers:
        fleet.heard(worker, SILENCE_S)
    fleet.tick(SILENCE_S)
    assert not fleet.isolated


def test_draining_workers_are_not_counted() -> None:
    fleet, workers = several(5)
    for worker in workers[:3]:
        fleet.deregister(worker)
    for worker in workers[3:]:
        fleet.heard(worker, SILENCE_S)
    fleet.tick(SILENCE_S)
    assert not fleet.isolated
