"""Random requests, aborts and hand-offs on a small pool: every request ends and no block leaks.

The decoder reads every key through the tables and fails on a key of another sequence. A block that
is shared while it is written therefore shows as a failed request or as wrong tokens.
"""

from collections import Counter
from itertools import count

from builders.engine_kit import ask, fake_engine
from fakes.decoder import fake_spec, reference
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdserve.engine.api import (
    ChoiceState,
    ContextLengthExceeded,
    Evicted,
    Finished,
    NewTokens,
    PrefillComputed,
    Request,
    RequestFailed,
    Step,
    prefix_ids,
)
from pdserve.engine.scheduling import Reservation

TICK_S = 0.01  # between two readings of the clock, so that runs are reproducible

# Few distinct prompts, so that prefixes are shared.
PROMPTS = st.builds(
    lambda start, length: [(start + i) % 50 for i in range(length)],
    st.integers(0, 1),
    st.integers(1, 30),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        window=st.sampled_from([0, 6]),
        num_blocks=st.integers(9, 20),
        chunk_size=st.sampled_from([4, 7, 16]),
        cache=st.booleans(),
        launches_ahead=st.booleans(),
    )
    def build(
        self, window: int, num_blocks: int, chunk_size: int, cache: bool, launches_ahead: bool
    ) -> None:
        self.window = window
        self.engine = fake_engine(
            num_blocks,
            window=window,
            chunk_size=chunk_size,
            max_running=4,
            prefix_cache=cache,
            clock=count(0, TICK_S).__next__,  # the order of prompts depends on waiting times
            ahead=launches_ahead,
        )
        self.source = fake_engine(200, window=window, prefix_cache=False)
        self.requests: dict[str, Request] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ends: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.reservations: list[tuple[Reservation, Request]] = []
        self.held: set[str] = set()

    def request(self, prompt: list[int], n: int, cut: int) -> Request:
        key = f"r{len(self.requests)}"
        whole = reference(prompt, fake_spec(4, self.window), cut)
        cuts = [max(0, cut - c) for c in range(n)]  # choices have different lengths
        states = tuple(ChoiceState(tuple(whole[:at])) for at in cuts) if cut else ()
        return ask(key, prompt, n=n, max_tokens=10, choices=states)

    @rule(prompt=PROMPTS, n=st.integers(1, 3), cut=st.integers(0, 6))
    def submit(self, prompt: list[int], n: int, cut: int) -> None:
        request = self.request(prompt, n, cut)
        try:
            self.engine.submit(request)
        except ContextLengthExceeded:
            event("never fits")
            return
        self.requests[request.key] = request

    @rule(prompt=PROMPTS)
    def submit_prefill(self, prompt: list[int]) -> None:
        # Only their holder releases held blocks: leave room for other requests.
        if len(self.held) < 1 and len(prompt) <= 16:
            key = f"p{len(self.requests)}"
            self.engine.submit(ask(key, prompt, prefill_only=True))
            self.requests[key] = ask(key, prompt, prefill_only=True)
            self.held.add(key)

    @rule(prompt=PROMPTS, n=st.integers(1, 2), cut=st.integers(0, 6))
    def reserve(self, prompt: list[int], n: int, cut: int) -> None:
        request = self.request(prompt, n, cut)
        if len(self.reservations) >= 2:
            return
        try:
            reservation = self.engine.reserve(request)
        except ContextLengthExceeded:
            return
        if reservation is None:
            event("no blocks to reserve")
            return
        self.requests[request.key] = request
        self.reservations.append((reservation, request))

    @precondition(lambda self: self.reservations)
    @rule(commit=st.booleans())
    def end_reservation(self, commit: bool) -> None:
        reservation, request = self.reservations.pop(0)
        if not reservation.open:
            self.engine.release(reservation)
        elif commit:
            self.fill(reservation, request)
            self.engine.commit(reservation)
            event("committed")
        else:
            self.engine.release(reservation)
            self.ends[request.key] += 1

    @precondition(lambda self: self.reservations)
    @rule(part=st.floats(0, 1))
    def verify(self, part: float) -> None:
        """Verify a part of the blocks, as if the prefill worker might die before sending the
        others."""
        reservation, request = self.reservations[0]
        if not reservation.open:
            return
        end = int(part * len(reservation.blocks[0]))
        self.fill(reservation, request, end)
        kept = self.engine.verified(reservation, min(reservation.num_tokens, end * 4))
        event(f"a part of a prompt was kept: {reservation.cached_tokens < kept}")

    def fill(self, reservation: Reservation, request: Request, end: int | None = None) -> None:
        """Copy the blocks before `end` from an engine that has computed them."""
        ids = prefix_ids(request)[:-1]
        if not ids:
            return
        self.source.submit(ask("source", ids, prefill_only=True))
        while self.source.step() is not None:
            pass
        for group, held in enumerate(self.source.held_blocks("source")):
            first, targets = reservation.first_block[group], reservation.blocks[group]
            targets = targets[first:end]
            sources = held[first : first + len(targets)]
            payload = b"".join(self.source.kv.read(group, range(1), sources))
            self.engine.kv.write(group, range(1), targets, memoryview(payload))
        self.source.release_held("source")

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), choice=st.sampled_from([None, 0, 1]))
    def abort(self, data: st.DataObject, choice: int | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        known = key in self.engine.jobs.by_key
        assert self.engine.abort(key, () if choice is None else (choice,)) == known
        if known:
            self.aborted.add(key)
            if key in self.held and key not in self.engine.jobs.by_key:
                self.held.discard(key)
                self.ends[key] = 1  # a held request was already counted

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        jobs = self.engine.jobs
        steps = key in jobs.waiting or key in {job.key for job in jobs.running}
        if key not in self.held:
            assert self.engine.park(key) == steps

    @precondition(lambda self: len(self.engine.jobs.parked) > 1)
    @rule()
    def unpark(self) -> None:
        self.engine.unpark(list(self.engine.jobs.parked)[-1])
        event("unparked")

    @precondition(lambda self: self.held)
    @rule()
    def release_held(self) -> None:
        for key in sorted(self.held & set(self.engine.jobs.held)):
            self.engine.release_held(key)
            self.held.discard(key)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            step = self.engine.step()
            if step is not None:
                self.note(step)

    def note(self, step: Step) -> None:
        for e in step.events:
            assert not isinstance(e, RequestFailed), e
            if isinstance(e, NewTokens):
                self.got.setdefault((e.key, e.choice), []).extend(e.ids)
            if isinstance(e, Evicted):
                event("evicted")
                self.aborted.add(e.key)
            if isinstance(e, Finished | Evicted) or (
                isinstance(e, PrefillComputed) and e.done and self.requests[e.key].prefill_only
            ):
                self.ends[e.key] += 1

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        for number, pool in enumerate(self.engine.jobs.tables.pools):
            jobs = self.engine.jobs.by_key.values()
            in_tables = {
                b
                for job in jobs
                for sequence in job.sequences
                for b in sequence.block_tables[number]
                if b
            }
            counts = pool.counts()
            assert counts.total == pool.num_blocks
            assert counts.used + counts.reserved == len(in_tables)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.reservations:
            self.end_reservation(commit=True)
        for key in list(self.engine.jobs.parked):
            assert self.engine.unpark(key)
        for _ in range(3000):
            self.release_held()
            step = self.engine.step()
            if step is None:
                break
            self.note(step)
        else:
            raise AssertionError("requests do not end")
        self.release_held()
        event(f"preemptions: {min(self.engine.stats().preemptions, 3)}")
        event(f"hits: {self.engine.stats().prefix_hits > 0}")
        for key, request in self.requests.items():
            assert self.ends[key] == 1, (key, self.ends[key])
            if key in self.aborted or request.prefill_only or key not in {k for k, _ in self.got}:
                continue
            prompt = list(request.prompt_ids)
            whole = reference(prompt, fake_spec(4, self.window), 10)
            for choice in range(request.params.n):
                start = len(request.choices[choice].generated_ids) if request.choices else 0
                assert self.got[key, choice] == whole[start:], key
        for pool in self.engine.jobs.tables.pools:
            counts = pool.counts()
            assert counts.used == counts.reserved == 0
        assert self.engine.jobs.num_free_slots == 4


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30)
