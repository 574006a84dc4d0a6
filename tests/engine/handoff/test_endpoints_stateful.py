"""The real Sender and Receiver under random sequences of events, in one thread with simulated time.

Records and frames are held in transit and arrive when a rule says so: late, twice, out of order,
torn, or never. The fake decoder's tokens depend on every key, so a byte written by a wrong frame
changes the answer.
"""

import os
from collections import Counter
from functools import partial
from random import Random
from typing import Any

from builders.engine_kit import ask, assert_at_rest, fake_engine
from fakes.decoder import reference
from fakes.memory_link import Frame, MemoryLink
from fakes.memory_prefill import Worker
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.engine.api import Finished, NewTokens, Step, prefix_ids
from pdserve.engine.handoff.incoming import Received
from pdserve.engine.handoff.protocol import PREFIX_BYTES, PROGRESS_S, messages
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.sender import PromptToSend

HITS: Counter[str] = Counter()  # how often each interesting state occurred
BLOCKS, WINDOW, STEP_S = 16, 10, 0.001


class EndpointsMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.random = Random(seed)
        self.now, self.steps = 100.0, 0
        self.next_tick: dict[Any, float] = {}
        self.decode = fake_engine(num_blocks=BLOCKS, window=WINDOW, clock=self.clock)
        self.wrong: list[str] = []  # a Receiver continues when a write raises
        self.guard_writes()
        self.received: dict[bytes, Received] = {}
        self.lost: dict[bytes, str] = {}
        self.receiver = Receiver(
            self.decode,
            self.decode.kv,
            incarnation=b"D" * 16,
            identity=self.decode.kv_identity,
            on_received=self.on_received,
            on_lost=self.on_lost,
            wake=lambda: None,
            liveness=lambda: self.steps,
            clock=self.clock,
        )
        self.workers = [Worker(self, BLOCKS, WINDOW), Worker(self, BLOCKS, WINDOW)]
        self.dead: list[Worker] = []
        self.requests: dict[bytes, Any] = {}
        self.tokens: dict[str, list[int]] = {}
        self.over: list[tuple[MemoryLink, Frame]] = []  # frames that have arrived

    def clock(self) -> float:
        return self.now

    def guard_writes(self) -> None:
        """Record an error for a write into a block that is not reserved, is shared or is cached."""
        write, pools = self.decode.kv.write, self.decode.jobs.tables.pools

        def guarded(group: int, layers: range, blocks: list[int], payload: memoryview) -> None:
            for block in blocks:
                if pools[group].references()[1][block] != 1:
                    self.wrong.append(f"a write into another's block {block}")
                if not pools[group].writable(block):
                    self.wrong.append(f"a write into the cached block {block}")
            write(group, layers, blocks, payload)

        self.decode.kv.write = guarded  # type: ignore[method-assign]

    def on_received(self, received: Received) -> None:
        assert received.attempt not in self.received
        assert received.attempt not in self.lost
        self.received[received.attempt] = received
        HITS["received"] += 1

    def on_lost(self, attempt: bytes, reason: str) -> None:
        assert attempt not in self.lost
        assert attempt not in self.received
        self.lost[attempt] = reason
        HITS[f"lost: {reason.partition(':')[0]}"] += 1

    # --- progress

    def turns(self) -> list[Any]:
        """Return the actions that processes perform without input."""
        found: list[Any] = [self.poll_decode, self.step_decode]
        for worker in self.workers:
            found += [partial(self.poll, worker), partial(self.step, worker)]
        return found

    def arrivals(self) -> list[Any]:
        """Return the arrivals of data in transit, in order per connection."""
        found: list[Any] = []
        for worker in self.workers:
            found += [partial(self.connect, worker)] * bool(worker.dials.calls)
            for link in worker.links:
                for end in (link, link.other):
                    found += [end.hear] * bool(end.open and end.inbox)
                    found += [partial(self.notice, end)] * bool(end.open and not end.other.open)
                found += [link.write_frame] * bool(link.open and link.jobs and link.free)
                found += [partial(self.hear_frame, link.other)] * bool(link.other.frames)
        return found

    def poll_decode(self) -> None:
        self.receiver.poll()
        self.tick(self.receiver)

    def poll(self, worker: Worker) -> None:
        worker.sender.poll()
        self.tick(worker.sender)

    def tick(self, side: Any) -> None:
        """Do what the ticker thread does ten times a second."""
        if self.now >= self.next_tick.get(side, 0.0):
            self.next_tick[side] = self.now + PROGRESS_S
            for attempt in side.live:
                if attempt.state.linked:
                    attempt.post(messages.Progress(self.steps, False))

    def step_decode(self) -> bool:
        self.steps += 1
        step = self.decode.step()
        for event in step.events if step else ():
            if isinstance(event, NewTokens):
                self.tokens.setdefault(event.key, []).extend(event.ids)
            elif isinstance(event, Finished):
                request = self.requests[bytes.fromhex(event.key)]
                expected = reference(list(request.prompt_ids), self.decode.kv.spec, 3)
                assert self.tokens[event.key] == expected
                HITS["finished"] += 1
        return step is not None

    def step(self, worker: Worker) -> bool:
        plan = worker.engine.schedule()
        if plan is None:
            return False
        if plan.events:
            worker.sender.on_step(worker.engine.announce(plan))
        step: Step = worker.engine.collect(worker.engine.launch(plan))
        worker.sender.on_step(step)
        return True

    def connect(self, worker: Worker) -> None:
        worker.dials.calls.pop(0)()

    def notice(self, end: MemoryLink) -> None:
        end.end("closed by the peer")

    def hear_frame(self, end: MemoryLink) -> None:
        """Deliver a random frame in transit."""
        at = self.random.randrange(len(end.frames))
        HITS["overtaken"] += at > 0
        frame = end.frames.pop(at)
        if end.open:
            end.hear_frame(frame)
            self.over.append((end, frame))

    @rule(count=st.integers(1, 40))
    def go(self, count: int) -> None:
        for _ in range(count):
            self.now += STEP_S
            self.random.choice(self.turns() + self.arrivals())()

    @rule(length=st.sampled_from([2, 9, 20, 33]), prompt=st.integers(0, 2), which=st.integers(0, 1))
    def hand_off(self, length: int, prompt: int, which: int) -> None:
        ids = [(i * 7 + prompt * 13 + i * i) % 60 for i in range(length)]
        request = ask(os.urandom(16).hex(), ids, max_tokens=3)
        worker = self.workers[which]
        attempt = bytes.fromhex(request.key)
        deadline = self.now + self.random.choice([0.1, 5.0, 5.0, 5.0])
        ticket = self.receiver.admit(attempt, request, worker.incarnation, deadline)
        if ticket is None:
            HITS["busy"] += 1
            return
        self.requests[attempt] = request
        ids_to_send = prefix_ids(request)[:-1]
        worker.sender.start_sending(ticket, "", PromptToSend(tuple(ids_to_send)), deadline)

    # --- faults

    def rarely(self) -> bool:
        return self.random.random() < 0.4

    def frames(self) -> list[tuple[MemoryLink, int]]:
        ends = [link.other for worker in self.workers for link in worker.links]
        return [(end, i) for end in ends if end.open for i in range(len(end.frames))]

    @rule(bit=st.integers(0, 10_000), header=st.booleans())
    def tear(self, bit: int, header: bool) -> None:
        found = self.frames()
        if not found or (header and not self.rarely()):
            return
        end, at = found[bit % len(found)]
        record, payload = end.frames[at]
        changed = bytearray(record[PREFIX_BYTES:] if header else payload)
        changed[bit % len(changed)] ^= 1 << bit % 8
        torn = bytes(changed)
        end.frames[at] = (record[:PREFIX_BYTES] + torn, payload) if header else (record, torn)
        HITS["torn header" if header else "torn payload"] += 1

    @rule(which=st.integers(0, 100))
    def duplicate(self, which: int) -> None:
        found = self.frames()
        if found:
            end, at = found[which % len(found)]
            end.frames.append(end.frames[at])
            HITS["duplicate"] += 1

    @rule(which=st.integers(0, 100))
    def replay(self, which: int) -> None:
        """Deliver a frame again, on its connection or on another one."""
        ends = [end for end, _ in self.over if end.open]
        if not self.over or not ends:
            return
        end, frame = self.over[which % len(self.over)]
        target = end if end.open else ends[which % len(ends)]
        HITS["replayed" if target is end else "replayed elsewhere"] += 1
        target.hear_frame(frame)

    @rule(which=st.integers(0, 100))
    def say_again(self, which: int) -> None:
        """Duplicate a control record."""
        ends = [e for w in self.workers for link in w.links for e in (link, link.other) if e.inbox]
        if ends and self.rarely():
            end = ends[which % len(ends)]
            end.inbox.append(end.inbox[which % len(end.inbox)])
            HITS["said again"] += 1

    @rule(which=st.integers(0, 100))
    def cut(self, which: int) -> None:
        ends = [e for w in self.workers for link in w.links for e in (link, link.other) if e.open]
        if ends and self.rarely():
            end = ends[which % len(ends)]
            HITS["cut between frames"] += bool(end.frames or end.jobs or end.other.jobs)
            end.end("reset")

    @rule(which=st.integers(0, 100), at_decode=st.booleans())
    def cancel(self, which: int, at_decode: bool) -> None:
        sides: list[Any] = [self.receiver] if at_decode else [w.sender for w in self.workers]
        live = [(side, attempt) for side in sides for attempt in side.live]
        if live and self.rarely():
            side, attempt = live[which % len(live)]
            state = attempt.state
            HITS[f"cancelled {state.side.value} {state.phase.value}"] += 1
            assert side.cancel(attempt.ticket.attempt, "cancel")

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        """Replace a worker by a new process; data that it has sent may still arrive."""
        if not self.rarely():
            return
        dead, self.workers[which] = self.workers[which], Worker(self, BLOCKS, WINDOW)
        HITS["crashed while sending"] += any(a.next_blocks for a in dead.sender.live)
        for link in dead.links:
            link.reason = link.reason or "dead"
            for record in link.other.frames if link.other.open and self.rarely() else ():
                link.other.hear_frame(record)
            if link.other.open:
                link.other.end("closed by the peer")
        self.dead.append(dead)

    @rule(which=st.integers(0, 1))
    def refuse(self, which: int) -> None:
        self.workers[which].refuses = self.rarely()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.1]))
    def wait(self, seconds: float) -> None:
        """Let time pass without messages; after a second every peer counts as silent."""
        if seconds < 1 or self.rarely():
            self.now += seconds

    # --- invariants

    @invariant()
    def promises_are_those_of_live_attempts(self) -> None:
        if not hasattr(self, "receiver"):
            return
        live = self.receiver.live
        assert self.receiver.promises.blocks == sum(a.promised for a in live if a.state.promised)
        for engine in (self.decode, *(w.engine for w in self.workers)):
            for pool in engine.jobs.tables.pools:
                assert pool.counts().total == pool.num_blocks

    def settle(self) -> None:
        """Deliver everything in transit and run until no work remains."""
        quiet = 0
        while quiet < 3:
            self.now += STEP_S
            busy = bool(sum(bool(turn()) for turn in self.turns()))  # runs all of them
            while arrivals := self.arrivals():
                arrivals[0]()
                busy = True
            quiet = 0 if busy else quiet + 1

    def teardown(self) -> None:
        """Check that each attempt has ended once on each side and that every block is back."""
        if not hasattr(self, "receiver"):
            return
        self.settle()
        self.now += 6.0  # after every deadline
        self.settle()
        assert self.received.keys() | self.lost.keys() == self.requests.keys()
        assert (self.receiver.num_live, self.receiver.promises.blocks) == (0, 0)
        assert_at_rest(self.decode)
        assert self.wrong == []
        for worker in self.workers:
            assert worker.sender.num_live == 0
            assert_at_rest(worker.engine)
        for worker in (*self.workers, *self.dead):
            HITS["sent"] += sum(not sent.reason for sent in worker.sent.values())
            HITS["dial refused"] += worker.num_refused


TestEndpoints = EndpointsMachine.TestCase
TestEndpoints.settings = settings(max_examples=40, stateful_step_count=40)

WEIGHTS = {"go": 30, "hand_off": 8, "tear": 2, "duplicate": 2, "replay": 2, "say_again": 1}
WEIGHTS |= {"cut": 1, "cancel": 2, "crash": 1, "refuse": 1, "wait": 3}


def drive(machine: EndpointsMachine, random: Random, steps: int) -> None:
    """Apply the same rules for many steps, with weights that let hand-offs make progress."""
    machine.begin(random.randrange(1000))
    for _ in range(steps):
        what = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        which = random.randrange(100)
        if what == "go":
            machine.go(random.randrange(1, 25))
        elif what == "hand_off":
            machine.hand_off(random.choice([2, 9, 20, 33]), random.randrange(3), which % 2)
        elif what == "tear":
            machine.tear(random.randrange(10_000), which % 3 == 0)
        elif what == "cancel":
            machine.cancel(which, which % 2 == 0)
        elif what in ("crash", "refuse"):
            getattr(machine, what)(which % 2)
        elif what == "wait":
            machine.wait(random.choice([0.05, 1.1]))
        else:
            getattr(machine, what)(which)
        machine.promises_are_those_of_live_attempts()
    machine.teardown()


def test_long_runs_reach_every_interesting_state() -> None:
    HITS.clear()
    for seed in range(20):
        drive(EndpointsMachine(), Random(seed), 250)
    print(dict(sorted(HITS.items())))
    wanted = {
        "received", "finished", "sent", "overtaken", "duplicate", "replayed", "replayed elsewhere",
        "said again", "torn payload", "torn header", "cut between frames", "crashed while sending",
        "dial refused", "busy", "lost: connection", "lost: deadline", "lost: peer", "lost: cancel",
        "lost: peer silent", "cancelled receive admitted", "cancelled receive receiving",
        "cancelled send admitted", "cancelled send receiving",
    }  # fmt: skip
    assert {state: HITS[state] for state in wanted if not HITS[state]} == {}
