"""The one queue of waiting requests."""

from dataclasses import dataclass
from random import Random

from pdserve.services.router.placement import WaitingQueue, WaitReason, WorkerPool


@dataclass(eq=False)
class Asker:
    ordinal: int
    model: str
    tenant: bytes = b""
    priority: int = 0

    @property
    def pool(self) -> WorkerPool:
        return WorkerPool(self.model)

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.ordinal


def test_each_line_stays_in_order_of_rank_when_requests_leave_or_return() -> None:
    left = back = changed = 0
    for seed in range(20):
        rng = Random(seed)
        queue: WaitingQueue[Asker] = WaitingQueue()
        waiting: dict[Asker, tuple[WaitReason, float]] = {}
        for ordinal in range(300):
            asker = Asker(ordinal, rng.choice("ab"), priority=rng.choice((-9, 0, 0, 7)))
            if waiting and rng.random() < 0.5:
                gone = rng.choice(list(waiting))
                queue.remove(gone)
                queue.remove(gone)
                del waiting[gone]
                left += 1
                if rng.random() < 0.5:
                    asker = gone
                    back += 1
            elif waiting and rng.random() < 0.3:  # it waits for something else from now on
                asker = rng.choice(list(waiting))
                changed += 1
            waiting[asker] = rng.choice(list(WaitReason)), float(ordinal)
            queue.add(asker, *waiting[asker])
            assert len(queue) == len(waiting)
            assert set(queue) == set(waiting)
            for reason in WaitReason:
                line = [w for w, (why, _) in waiting.items() if why is reason]
                assert queue.num(reason) == len(line)
                assert queue.of(reason) == sorted(line, key=lambda w: w.rank)
                assert all(queue.since(w) == waiting[w][1] for w in line)
            turn = [w for w, (why, _) in waiting.items() if why is WaitReason.TURN]
            for model in "ab":
                line = [w for w in turn if w.model == model]
                assert queue.head(WorkerPool(model)) is min(
                    line, key=lambda w: w.rank, default=None
                )
            assert sorted(queue.pools) == sorted({w.pool for w in turn})
    assert min(left, back, changed) > 500


def test_tenants_take_turns() -> None:
    """A tenant keeps its turn until one of its requests has gone; order within a tenant is that of
    arrival.
    """
    for seed in range(20):
        rng = Random(seed)
        queue: WaitingQueue[Asker] = WaitingQueue()
        sizes = {b"flood": 200, b"one": 5, b"two": 3}
        askers = [Asker(0, "a", tenant) for tenant, n in sizes.items() for _ in range(n)]
        rng.shuffle(askers)
        for ordinal, asker in enumerate(askers):
            asker.ordinal = ordinal
            queue.add(asker, WaitReason.TURN, 0.0)
        order: list[Asker] = []
        while (head := queue.head(WorkerPool("a"))) is not None:
            assert queue.head(WorkerPool("a")) is head
            queue.remove(head)
            order.append(head)
        for tenant in sizes:
            own = [asker.ordinal for asker in order if asker.tenant == tenant]
            assert own == sorted(own)
        assert {asker.tenant for asker in order[:3]} == set(sizes)
        assert [a.tenant for a in order[:9]].count(b"flood") == 3
        assert {asker.tenant for asker in order[13:]} == {b"flood"}


def test_tenants_take_turns_in_every_line() -> None:
    queue: WaitingQueue[Asker] = WaitingQueue()
    for ordinal in range(6):
        queue.add(Asker(ordinal, "ab"[ordinal % 2], b"flood"), WaitReason.BUDGET, 0.0)
    queue.add(Asker(6, "a", b"one"), WaitReason.BUDGET, 0.0)
    assert [asker.ordinal for asker in queue.of(WaitReason.BUDGET)] == [0, 6, 1, 2, 3, 4, 5]
    queue.remove(queue.of(WaitReason.BUDGET)[0])
    assert queue.of(WaitReason.BUDGET)[1].ordinal == 6


def test_priorities_of_a_tenant_order_only_its_own_turns() -> None:
    """Whatever values a tenant gives, the turns of the other tenants do not change."""
    for seed in range(50):
        rng = Random(seed)
        tenants = [rng.choice((b"a", b"b", b"c")) for _ in range(60)]
        plain: WaitingQueue[Asker] = WaitingQueue()
        ranked: WaitingQueue[Asker] = WaitingQueue()
        for ordinal, tenant in enumerate(tenants):
            plain.add(Asker(ordinal, "m", tenant), WaitReason.TURN, 0.0)
            priority = rng.randrange(-3, 4) if tenant == b"a" else 0
            ranked.add(Asker(ordinal, "m", tenant, priority), WaitReason.TURN, 0.0)
        own: list[Asker] = []
        for _ in tenants:
            first, other = plain.head(WorkerPool("m")), ranked.head(WorkerPool("m"))
            assert first is not None
            assert other is not None
            assert first.tenant == other.tenant
            if first.tenant == b"a":
                own.append(other)
            else:
                assert first.ordinal == other.ordinal
            plain.remove(first)
            ranked.remove(other)
        assert own == sorted(own, key=lambda asker: (asker.priority, asker.ordinal))
