"""The workers that a placement may choose among, and what it knows about each."""

from hypothesis import given
from hypothesis import strategies as st
from systems.dispatcher_world import BLOCKS, NUMERICS, World

from pdserve.engine.kv import Mixing
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE, Load, PrefixEvents
from pdserve.services.router.fleet import Worker
from pdserve.services.router.fleet.worker import UNREPORTED_S
from pdserve.services.router.placement import FactsOfWorkers, WorkerPool
from pdserve.services.router.request import PickQuery
from pdserve.services.router.request.machine import ANSWER_S
from pdserve.services.router.request.placer import MAX_ADMITTING

IDS = list(range(200))


def requests_of(world: World) -> list[tuple[Worker, str]]:
    """Return workers and requests of all Admits."""
    return [(worker, admit.start.request) for worker, admit in world.commands("admit")]


def answer(world: World, at: int) -> None:
    """Confirm that decode has taken this Admit."""
    worker, admit = world.commands("admit")[at]
    admitted = wire.DecodeEvent(admitted=wire.Admitted(attempt=admit.attempt))
    world.dispatcher.on_decode(worker, admitted, world.now)


def test_a_worker_with_enough_unanswered_admits_gets_no_more() -> None:
    world = World(Mixing(), "never")
    only = world.join(DECODE)
    names = [f"r{number}" for number in range(MAX_ADMITTING + 2)]
    for name in names:
        world.submit(name)
    assert requests_of(world) == [(only, name) for name in names[:MAX_ADMITTING]]
    assert world.dispatcher.num_queued == 2
    answer(world, 0)
    world.pass_time(0.05)
    assert requests_of(world) == [(only, name) for name in names[: MAX_ADMITTING + 1]]


def test_a_worker_that_does_not_answer_is_not_tried_again_at_once() -> None:
    for seed in range(8):  # the choice between equals is random
        world = World(Mixing(), "never", seed=seed)
        both = {world.join(DECODE), world.join(DECODE)}
        world.submit("r")
        world.pass_time(ANSWER_S + 0.1)
        assert {worker for worker, _ in requests_of(world)} == both


def test_a_picker_gets_the_other_workers_by_cost() -> None:
    world = World(Mixing(), "never")
    workers = [world.join(DECODE) for _ in range(4)]
    for worker, waiting in zip(workers, (90_000, 0, 270_000, 180_000), strict=True):
        worker.report(Load(waiting_tokens=waiting))
    hosts = {worker.host for worker in workers}
    picked = world.dispatcher.placer.pick(PickQuery(WorkerPool("m"), IDS, b"", hosts), world.now)
    order = [workers[number].host for number in (1, 0, 3, 2)]
    assert [one.host for one in picked] == order


@given(
    st.lists(
        st.tuples(
            st.sampled_from([{}, BLOCKS, NUMERICS]),
            st.booleans(),
            st.integers(0, 12),
            st.integers(0, 199),
        ),
        max_size=8,
    )
)
def test_facts_of_many_workers_equal_those_of_each(
    fleet: list[tuple[dict[str, bytes], bool, int, int]],
) -> None:
    """The kinds may follow each other in any order; each kind has its own hashes and
    block sizes.
    """
    world = World(Mixing(), "never")
    placer = world.dispatcher.placer
    workers, verified = [], {}
    for number, (card, has_command, num_blocks, num_verified) in enumerate(fleet):
        worker = world.join(DECODE, {"transports": ["tcp", "shm"][: 1 + number % 2]}, **card)
        load = {"running": number, "waiting_tokens": 7 * number, "promised_tokens": number}
        worker.report(Load(blocks_free=100, blocks_cached=20, **load))
        if has_command:
            worker.commanded(b"attempt", 30, world.now)
        chain = facts_of(world).chain(worker)[:num_blocks]
        worker.prefixes.apply(PrefixEvents(added=chain))
        placer.promised.add(b"%d" % number, worker.incarnation, chain[: num_blocks // 2])
        if num_verified:
            verified[worker.incarnation] = num_verified
        workers.append(worker)
    found = facts_of(world, verified).of_all(workers)
    assert found == [facts_of(world, verified).of(worker) for worker in workers]
    for facts, worker, (_, has_command, num_blocks, num_verified) in zip(
        found, workers, fleet, strict=True
    ):
        size = worker.kind.layout.block_size
        number = workers.index(worker)
        assert facts.kind is worker.kind
        cached = size * min(num_blocks, (len(IDS) - 1) // size)
        assert facts.cached_tokens == max(cached, num_verified)
        assert facts.promised_tokens == size * min(num_blocks // 2, (len(IDS) - 1) // size)
        assert facts.waiting_tokens == 7 * number + 30 * has_command
        assert facts.requests == number + has_command
        assert facts.free_tokens == 120 * size - number


def test_a_command_that_no_load_names_expires_before_a_placement() -> None:
    """The command expires whether or not the router has ticked meanwhile."""
    world = World(Mixing(), "never")
    worker = world.join(DECODE)
    worker.commanded(b"attempt", 30, world.now)
    assert facts_of(world).of(worker).requests == 1
    world.now += UNREPORTED_S
    facts = facts_of(world).of(worker)
    assert (facts.requests, facts.waiting_tokens) == (0, 0)


def facts_of(world: World, verified: dict[bytes, int] | None = None) -> FactsOfWorkers:
    fleet, promised = world.fleet, world.dispatcher.placer.promised
    return FactsOfWorkers(IDS, b"", verified or {}, fleet.prefixes, promised, world.now)
