"""The job table alone: after any operations, every block and slot has exactly one owner."""

import ast
import random
from collections import Counter
from pathlib import Path

from builders.job_kit import VOCAB, check_table, make_job, make_jobs, prompt_of

from pdserve.engine.api import FinishReason
from pdserve.engine.scheduling import EngineLimits, RequestState, Reservation, Sequence

RUNS = 1500
SLOTS = 4
ENGINE = Path(__file__).parents[3] / "engine"


class Bench:
    """A job table with every operation that the engine could perform, in any order."""

    def __init__(self, rng: random.Random, reached: Counter[str]) -> None:
        self.rng, self.reached = rng, reached
        size, window = rng.choice((2, 4)), rng.choice((0, 0, 5))
        num_blocks = rng.randrange(9, 12)
        self.limits = EngineLimits(VOCAB, 64, size, num_blocks, SLOTS, 4)
        self.jobs = make_jobs(self.limits, window)
        self.arrivals = 0
        self.ended: list[Reservation] = []
        self.verified: dict[str, int] = {}  # number of verified tokens by reservation

    def job(self, **params: object) -> RequestState:
        self.arrivals += 1
        prompt = prompt_of(self.rng, self.rng.randrange(1, 10))
        return make_job(self.limits, f"r{self.arrivals}", self.arrivals, prompt, **params)

    def any(self, found: list[RequestState]) -> RequestState | None:
        return self.rng.choice(found) if found else None

    def add(self) -> None:
        if len(self.jobs.by_key) < 8:
            if self.rng.random() < 0.25:
                self.jobs.add(self.job(prefill_only=True))
            else:
                self.jobs.add(self.job(n=self.rng.randrange(1, 3), max_tokens=4))

    def admit(self) -> None:
        job = self.any(list(self.jobs.waiting.values()))
        if job is None or job.num_places > self.jobs.num_free_slots:
            return
        had_blocks = bool(job.sequences)
        while self.jobs.admit(job) is None:
            assert job.key in self.jobs.waiting
            assert not job.sequences
            assert not had_blocks, "a request that has blocks must be admitted"
            self.reached["short"] += 1
            if self.jobs.evict() is None:
                return
            self.reached["evicted"] += 1
        self.reached["with blocks" if had_blocks else "admitted"] += 1
        assert job in self.jobs.running
        if not job.sequences[0].num_left:
            self.jobs.hold(job)

    def step(self) -> None:
        """Compute a row for most sequences of running requests."""
        for job in list(self.jobs.running):
            for sequence in list(job.sequences):
                if job in self.jobs.running and self.rng.random() < 0.8:
                    self.compute(job, sequence)

    def compute(self, job: RequestState, sequence: Sequence) -> None:
        """Compute a row as the scheduler and StepProgress do."""
        end = min(len(sequence.ids), sequence.num_computed + 4)
        while (copies := self.jobs.extend(sequence, end)) is None:
            if self.jobs.evict() is not None:
                self.reached["evicted"] += 1
                continue
            victim = self.jobs.victim(set())
            if victim is None:
                return
            self.jobs.preempt(victim)
            self.reached["preempted"] += 1
            assert not victim.sequences
            if victim is job:
                return
        self.reached["copies"] += len(copies)
        trimmed = list(sequence.num_trimmed)
        self.jobs.advance(sequence, end)
        self.reached["trims"] += sequence.num_trimmed != trimmed
        if sequence.num_left:
            return
        if sequence.is_prefix:
            if job.request.prefill_only:
                self.jobs.hold(job)
                return
            sequence.is_prefix = False
            first, *others = job.unfinished
            for choice in others:
                self.jobs.fork(sequence, choice)
                self.reached["forks"] += 1
            sequence.ids = job.branch_ids(first)
            sequence.choices = (first,)
        for each in job.sequences:
            if not each.num_left or each is sequence:
                (choice,) = each.choices
                job.generated[choice].append(self.rng.randrange(VOCAB))
                each.ids = job.branch_ids(choice)

    def end_choice(self) -> None:
        """End one of several choices of a request."""
        found = [j for j in self.jobs.running if len(j.sequences) > 1]
        if (job := self.any(found)) is not None:
            sequence = self.rng.choice(job.sequences)
            job.finish[sequence.choices[0]] = FinishReason.STOP
            self.jobs.end_sequence(sequence)
            self.reached["choices ended"] += 1

    def park(self) -> None:
        job = self.any([*self.jobs.waiting.values(), *self.jobs.running])
        if job is not None:
            self.jobs.park(job)
            self.reached["parked"] += bool(job.sequences)

    def unpark(self) -> None:
        job = self.any(list(self.jobs.parked.values()))
        if job is not None:
            self.jobs.unpark(job)

    def hold(self) -> None:
        ready = [
            job
            for job in [*self.jobs.running, *self.jobs.parked.values()]
            if len(job.sequences) == 1 and job.sequences[0].num_left == 1
        ]
        job = self.any(ready)
        if job is not None:
            self.jobs.hold(job)
            self.reached["held"] += 1

    def unhold(self) -> None:
        job = self.any([j for j in self.jobs.held.values() if not j.request.prefill_only])
        if job is not None:
            self.jobs.unhold(job)

    def reserve(self) -> None:
        made = self.jobs.reserve(self.job(max_tokens=4)) if len(self.jobs.by_key) < 8 else None
        if made is None:
            return
        reservation, _ = made
        assert reservation.open
        assert self.jobs.reserved[reservation.key] is reservation
        self.reached["reserved"] += 1

    def verify(self) -> None:
        for reservation in self.jobs.reserved.values():
            known = self.verified.get(reservation.key, 0)
            part = self.rng.randrange(known, reservation.num_tokens + 1)
            self.verified[reservation.key] = part
            cached = self.jobs.verified(reservation, part)
            assert cached <= max(part, reservation.cached_tokens)
            self.reached["verified"] += cached > reservation.cached_tokens

    def end_reservation(self) -> None:
        for reservation in list(self.jobs.reserved.values())[:1]:
            way = self.rng.choice(("commit", "release", "abort"))
            if way == "commit":
                self.jobs.commit(reservation)
                assert self.jobs.waiting[reservation.key].sequences
            elif way == "release":
                self.jobs.release(reservation)
            else:
                self.jobs.end(reservation.job)
                self.jobs.release(reservation)  # it has no blocks, so none are freed
            self.reached[reservation.state.value] += 1
            assert not reservation.open
            self.ended.append(reservation)

    def end(self) -> None:
        job = self.any([j for j in self.jobs.by_key.values() if j.key not in self.jobs.reserved])
        if job is not None:
            self.jobs.end(job)


OFTEN = [Bench.step] * 8 + [Bench.admit] * 4 + [Bench.add] * 3
RARE = [Bench.park, Bench.park, Bench.unpark, Bench.hold, Bench.unhold, Bench.reserve, Bench.verify]
OPERATIONS = [*OFTEN, *RARE, Bench.end, Bench.end_reservation, Bench.end_choice]


def test_random_operations_keep_every_block_and_slot() -> None:
    reached = Counter[str]()
    for seed in range(RUNS):
        bench = Bench(random.Random(seed), reached)
        for _ in range(32):
            bench.rng.choice(OPERATIONS)(bench)
            check_table(bench.jobs, SLOTS)
        for job in list(bench.jobs.by_key.values()):
            bench.jobs.end(job)
        check_table(bench.jobs, SLOTS)
        for pool in bench.jobs.tables.pools:
            assert pool.num_available == pool.num_blocks
        for reservation in bench.ended:
            assert not reservation.open
    kinds = ["admitted", "with blocks", "short", "preempted", "evicted", "copies", "trims", "forks"]
    kinds += [
        "parked",
        "held",
        "reserved",
        "verified",
        "committed",
        "released",
        "aborted",
        "choices ended",
    ]
    assert all(reached[kind] > 20 for kind in kinds), reached


READING = {"block_size", "hashes", "main_pool", "num_found", "pools", "take_prefix_events"}
READING |= {"windows", "main_group", "first_seen"}


def test_only_the_job_table_changes_block_tables() -> None:
    """Only the job table calls methods that take or return blocks, and it alone has access to the
    pools."""
    pools, tables = set(), set()
    for path in ENGINE.rglob("*.py"):
        name = path.relative_to(ENGINE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and path.name != "__init__.py":
                imported = {alias.name for alias in node.names}
                pools |= {name} if "BlockPool" in imported else set()
                tables |= {name} if "BlockTables" in imported else set()
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute | ast.Name)
                and (getattr(node.value, "attr", "") or getattr(node.value, "id", "")) == "tables"
                and name != "scheduling/job_table.py"
                and name.startswith(("scheduling/", "engine.py"))
            ):
                assert node.attr in READING, f"{name} calls {node.attr}"
    assert pools == {"scheduling/block_tables.py"}
    assert tables == {"scheduling/job_table.py", "engine.py"}
