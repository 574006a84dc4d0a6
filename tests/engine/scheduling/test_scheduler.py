"""The scheduler alone, over a job table; the results of steps are simulated.

In thousands of random runs, every plan respects the limits and the order of requests, and every
request ends, however often it was preempted.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

from builders.engine_kit import ask, fake_engine
from builders.job_kit import VOCAB, check_table, make_job, make_jobs, prompt_of

from pdserve.engine.api import (
    Event,
    Evicted,
    Finished,
    NewTokens,
    PrefillComputed,
    QueueFull,
    Scheduled,
)
from pdserve.engine.scheduling import EngineLimits, Plan, RequestState, Row, Scheduler
from pdserve.engine.scheduling.fairness import ACTIVE_S, Turns

RUNS = 700


class Bench:
    """A scheduler, and a model that takes no time."""

    def __init__(self, rng: random.Random, reached: Counter[str], alike: bool = False) -> None:
        self.rng, self.reached, self.alike = rng, reached, alike
        size, window = rng.choice((2, 4)), rng.choice((0, 0, 5))
        num_blocks, self.slots, chunk = rng.randrange(10, 18), rng.randrange(2, 5), 4
        self.tenants = 1 if alike else rng.choice((1, 3))
        self.limits = EngineLimits(
            VOCAB, 64, size, num_blocks, self.slots, chunk, shared_step_tokens=rng.choice((0, 2))
        )
        self.jobs = make_jobs(self.limits, window)
        self.scheduler = Scheduler(self.jobs, self.limits)
        self.now, self.arrivals = 0.0, 0
        self.scheduled: list[str] = []
        self.evicted: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.refused: RequestState | None = None

    def new_job(self) -> RequestState:
        self.arrivals += 1
        key, kind = f"r{self.arrivals}", self.rng.random()
        prompt = prompt_of(self.rng, 7 if self.alike else self.rng.randrange(1, 11))
        tenant = bytes([self.rng.randrange(self.tenants)])
        make = partial(make_job, self.limits, key, self.arrivals, prompt, self.now, tenant=tenant)
        if kind < 0.2 and not self.alike:
            return make(prefill_only=True)
        n = 2 if kind < 0.5 and not self.alike and len(prompt) < 7 else 1
        return make(n=n, max_tokens=6)

    def disturb(self) -> None:
        """Perform an operation that may happen between two steps."""
        jobs, choice = self.jobs, self.rng.random()
        if choice < 0.1 and (stepping := [*jobs.waiting.values(), *jobs.running]):
            jobs.park(self.rng.choice(stepping))
        elif choice < 0.2 and jobs.parked:
            jobs.unpark(self.rng.choice(list(jobs.parked.values())))
        elif choice < 0.3 and jobs.held:
            job = next(iter(jobs.held.values()))
            jobs.end(job)
            self.ended[job.key] += 1
        elif choice < 0.4:
            self.reserve()
        elif choice < 0.5 and jobs.reserved:
            reservation = next(iter(jobs.reserved.values()))
            jobs.commit(reservation)
            self.reached["committed"] += 1

    def reserve(self) -> None:
        """Reserve blocks for the first waiting hand-off, as Engine.reserve does."""
        job = self.refused
        if job is None:
            self.arrivals += 1
            prompt = prompt_of(self.rng, 7)
            job = make_job(self.limits, f"h{self.arrivals}", self.arrivals, prompt, max_tokens=6)
        first = self.scheduler.must_wait(job)
        self.reached["queue before a hand-off"] += first
        if not first and self.jobs.reserve(job) is not None:
            self.refused = None
            return
        self.refused = job
        self.scheduler.hold_up(job)
        self.reached["hand-off before the queue"] += 1

    def step(self) -> bool:
        """Schedule and check a step, and simulate its results."""
        self.now += 1.0
        if self.refused is not None:
            self.reserve()  # a waiting hand-off retries before every step
        events: list[Event] = []
        held_up = self.refused
        without_blocks = [j for j in self.jobs.waiting.values() if not j.sequences]
        before = self.jobs.preemptions
        plan = self.scheduler.schedule(self.now, events)
        self.reached["preempted"] += self.jobs.preemptions - before
        if self.now % 4 == 0:
            check_table(self.jobs, self.slots)
        if plan is None:
            return False
        self.check(plan)
        admitted = [e.key for e in plan.events if isinstance(e, Scheduled)]
        self.scheduled += admitted
        if held_up is not None and held_up.key not in self.jobs.by_key:
            for job in without_blocks:
                if job.order > held_up.order:
                    assert not job.sequences, "a request passed a hand-off that waits for blocks"
        for event in plan.events:
            if isinstance(event, Evicted):
                self.evicted.add(event.key)
                self.ended[event.key] += 1
                self.reached["evicted"] += 1
            if isinstance(event, PrefillComputed):
                assert event.key in self.jobs.held
                self.reached["all of it cached"] += 1
        for row in plan.rows:
            self.compute(row)
        return True

    def check(self, plan: Plan) -> None:
        limits, rows = self.limits, plan.rows
        assert plan.num_tokens <= limits.step_tokens
        assert len({id(row.sequence) for row in rows}) == len(rows), "two rows of one sequence"
        assert [row.num_tokens > 1 for row in rows] == sorted(row.num_tokens > 1 for row in rows)
        assert plan.num_decode_rows == sum(row.num_tokens == 1 for row in rows)
        for row in rows:
            job, total = row.sequence.job, len(row.sequence.ids)
            assert job in self.jobs.running, "a row of a request that is not running"
            assert row.sequence in job.sequences
            assert row.start == row.sequence.num_computed < row.end <= total
            assert row.start // limits.chunk_size == (row.end - 1) // limits.chunk_size
            assert row.end == total or row.end % limits.chunk_size == 0
            assert row.choices == (row.sequence.choices if row.end == total else ())
            assert row.first_output == (row.end - 1 if row.choices else row.end)
            for pool, table in zip(self.jobs.tables.pools, row.sequence.block_tables, strict=True):
                for at in range(row.start, row.end):
                    assert pool.writable(table[at // limits.block_size])
        tenants = {job.request.tenant for job in (*self.jobs.running, *self.jobs.waiting.values())}
        if len(tenants) > 1:
            self.check_shares(rows)
        self.reached["chunks"] += plan.num_decode_rows < len(rows)
        self.reached["mixed"] += 0 < plan.num_decode_rows < len(rows)
        self.reached["copies"] += len(plan.copies)

    def check_shares(self, rows: Sequence[Row]) -> None:
        """Check that no tenant has more than its share, except for the one-token rows of one job or
        a single chunk."""
        share, long = self.limits.shared_step_tokens, set[bytes]()
        for tenant in {row.sequence.job.request.tenant for row in rows}:
            own = [row for row in rows if row.sequence.job.request.tenant == tenant]
            sizes = Counter(row.sequence.job.order for row in own if row.num_tokens == 1)
            assert sizes.total() <= max(share, *sizes.values(), 0) + 1, (
                "rows of one token exceed the share"
            )
            chunks = [row.num_tokens for row in own if row.num_tokens > 1]
            assert sum(chunks) <= share or len(chunks) == 1
            if sum(chunks) > share:
                long.add(tenant)
        self.reached["shared"] += 1
        self.reached["one long chunk"] += len(long) == 1
        self.reached["long chunks of several"] += len(long) > 1

    def compute(self, row: Row) -> None:
        sequence, job = row.sequence, row.sequence.job
        if sequence not in job.sequences:
            return  # its request ended with another choice
        trimmed = list(sequence.num_trimmed)
        self.jobs.advance(sequence, row.end)
        self.reached["trims"] += sequence.num_trimmed != trimmed
        if sequence.num_left:
            return
        if job.request.prefill_only:
            self.jobs.hold(job)
            return
        if sequence.is_prefix:
            sequence.is_prefix = False
            first, *others = job.unfinished
            for choice in others:
                self.jobs.fork(sequence, choice)
            sequence.ids, sequence.choices = job.branch_ids(first), (first,)
        for each in [s for s in job.sequences if not s.num_left]:
            (choice,) = each.choices
            job.generated[choice].append(self.rng.randrange(VOCAB))
            each.ids.append(job.generated[choice][-1])
        if len(job.generated[0]) >= job.max_tokens:
            self.jobs.end(job)
            self.ended[job.key] += 1


def test_random_requests_respect_the_limits_and_end() -> None:
    reached = Counter[str]()
    for seed in range(RUNS):
        bench = Bench(random.Random(seed), reached)
        for _ in range(12):
            if len(bench.jobs.by_key) < 9 and bench.rng.random() < 0.7:
                bench.jobs.add(bench.new_job())
            bench.disturb()
            bench.step()
        finish(bench)
    kinds = ("preempted", "evicted", "chunks", "mixed", "copies", "trims", "all of it cached")
    kinds += (
        "shared",
        "one long chunk",
        "long chunks of several",
        "committed",
        "queue before a hand-off",
        "hand-off before the queue",
    )
    assert all(reached[kind] > 10 for kind in kinds), reached


def finish(bench: Bench) -> None:
    """Run without disturbances until every request has ended exactly once."""
    jobs = bench.jobs
    bench.refused = None
    for reservation in list(jobs.reserved.values()):
        jobs.release(reservation)
        bench.ended[reservation.key] += 1
    for job in list(jobs.parked.values()):
        jobs.unpark(job)
    names = set(jobs.by_key) | set(bench.ended)
    for _ in range(400):
        while jobs.held:
            job = next(iter(jobs.held.values()))
            jobs.end(job)
            bench.ended[job.key] += 1
        if not bench.step() and not jobs.held:
            break
    assert not jobs.by_key, "a request never ends"
    assert set(bench.ended.values()) <= {1}
    assert names == set(bench.ended)


def test_of_equal_requests_the_older_is_admitted_first() -> None:
    reached = Counter[str]()
    for seed in range(300):
        bench = Bench(random.Random(seed), reached, alike=True)
        for _ in range(8):
            bench.jobs.add(bench.new_job())
        finish(bench)
        orders = [int(key[1:]) for key in bench.scheduled]
        assert orders == sorted(orders)
        assert len(orders) == 8
    assert reached["preempted"] > 50, "too few requests lost their blocks and kept their place"


def test_tenants_take_turns() -> None:
    turns = Turns()
    entries = [(b"a", 1), (b"a", 2), (b"b", 3), (b"a", 4), (b"c", 5), (b"b", 6)]

    def order(entries: list[tuple[bytes, int]]) -> list[int]:
        return [number for _, number in turns.order(entries, lambda entry: entry[0])]

    assert order(entries) == [1, 3, 5, 2, 6, 4]
    turns.computed(b"a", 100)
    turns.computed(b"c", 10)
    assert order(entries) == [3, 5, 1, 6, 2, 4]
    assert order([*entries, (b"new", 7)]) == [3, 7, 5, 1, 6, 2, 4]
    assert order([(b"a", 3), (b"a", 1)]) == [3, 1]
    assert order(entries) == [3, 5, 1, 6, 2, 4], "a new tenant must come first"
    assert order([(b"c", 1)]) == [1]
    assert order([(b"a", 3), (b"b", 1)]) == [3, 1], "earlier computation must not count any more"


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    """The other tenant's prompt is the second one computed, however many wait before it."""
    engine = fake_engine(num_blocks=1024)
    for number in range(40):
        engine.submit(ask(f"flood {number}", [number] * 60, max_tokens=1))
    other = ask("other", [7] * 180, max_tokens=1)
    engine.submit(replace(other, tenant=b"other"))
    ended: list[str] = []
    while len(ended) < 41:
        for event in engine.step().events:
            if isinstance(event, Finished):
                ended.append(event.key)
    assert ended.index("other") < 12


def test_a_flood_takes_a_small_part_of_steps_that_others_wait_for() -> None:
    """Another tenant's short prompt runs in the next step, and every row of the flood gets its turn
    soon."""
    now = [0.0]
    engine = fake_engine(
        num_blocks=1024, max_running=24, shared_step_tokens=6, clock=lambda: now[0], context_len=512
    )
    for number in range(20):
        engine.submit(ask(f"flood {number}", [number] * 3, max_tokens=200))

    def step() -> list[str]:
        now[0] += 0.01
        return [event.key for event in engine.step().events if isinstance(event, NewTokens)]

    while len(step()) < 20:
        pass  # without others, one step has all its rows
    engine.submit(replace(ask("other", [7] * 4, max_tokens=3), tenant=b"other"))
    keys_by_step = [step(), step(), step()]
    assert all("other" in keys for keys in keys_by_step), (
        "the other tenant must have a row in every step"
    )
    assert [len(keys) for keys in keys_by_step] == [7, 7, 7]
    engine.submit(replace(ask("other 2", [7] * 4, max_tokens=2), tenant=b"other"))
    assert step() == ["other 2"], "the flood must give way after exceeding its share"
    engine.submit(replace(ask("third", [7] * 4, max_tokens=1), tenant=b"third"))
    assert len(step()) == 8, "the flood must not give way in every step"
    counts = Counter(key for _ in range(10) for key in step())
    assert counts.keys() == {f"flood {number}" for number in range(20)}
    assert set(counts.values()) == {3}
    assert len(step()) == 6, "the other tenant may come first again"
    now[0] += 2 * ACTIVE_S
    assert len(step()) == 20


def test_long_prompts_of_a_flood_run_one_at_a_time_but_do_run() -> None:
    """One runs in at least every second step, even if short prompts of new tenants keep
    arriving."""
    now = [0.0]
    engine = fake_engine(num_blocks=4096, shared_step_tokens=4, clock=lambda: now[0])
    keys_by_step = list[set[str]]()
    for number in range(40):
        flood = ask(f"flood {number}", [number] * 12, max_tokens=1)
        engine.submit(flood)
        newcomer = ask(f"new {number}", [2, 3, number], max_tokens=1)
        engine.submit(replace(newcomer, tenant=b"%d" % number))
        now[0] += 0.01
        keys_by_step.append({e.key for e in engine.step().events if isinstance(e, NewTokens)})
    floods = [[key for key in keys if key.startswith("flood")] for keys in keys_by_step]
    assert max(map(len, floods)) == 1
    assert all(a or b for a, b in pairwise(floods))
    assert all(f"new {number}" in keys for number, keys in enumerate(keys_by_step))


def test_a_long_prompt_ends_although_short_ones_keep_arriving() -> None:
    """New tenants come first, but not indefinitely."""
    now = [0.0]
    engine = fake_engine(num_blocks=8192, max_running=4, shared_step_tokens=4, clock=lambda: now[0])
    engine.submit(replace(ask("long", [1] * 120, max_tokens=1), tenant=b"long"))
    steps, number = 0, 0
    while True:
        for _ in range(6):  # exceeds the room of a step
            number += 1
            ask_one = ask(f"new {number}", [2, 3, number % 60, 4], max_tokens=1)
            with suppress(QueueFull):
                engine.submit(replace(ask_one, tenant=b"%d" % number))
        now[0] += 0.01
        steps += 1
        if "long" in {e.key for e in engine.step().events if isinstance(e, Finished)}:
            break
        assert steps < 200
    assert steps > 8, "other requests must come first"
