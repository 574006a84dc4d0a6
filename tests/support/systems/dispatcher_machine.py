"""A dispatcher, its client and its workers as one Hypothesis state machine, without sockets.

Checked throughout: one terminal event per request, ids in order without a gap, and no attempt left
running on a live worker once its request has ended or moved on.
"""

from collections import Counter
from random import Random
from typing import Any

from fakes.recorder import HITS, Recorder
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from pdserve.engine.kv import KvSpec, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.services.common.rpc import NumberedChoice, RequestProgress
from pdserve.services.router.dispatcher import Dispatcher
from pdserve.services.router.fleet import Fleet, Worker
from pdserve.services.router.placement import Rules
from pdserve.services.router.request.state import Stage

NUM_TOKENS = 12


class Remote:
    """An attempt as a worker sees it."""

    def __init__(self, worker: Worker, command: Any) -> None:
        self.worker = worker
        self.command = command
        self.admitted = False
        self.parked = False  # its session was lost: it sends nothing until it is resumed
        self.follows = False  # it waits for the KV of another
        self.sent: dict[int, int] = {}


class DispatcherMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        mode=st.sampled_from(["auto", "always", "always", "never"]), seed=st.integers(0, 100)
    )
    def begin(self, mode: str, seed: int) -> None:
        self.now = 100.0
        self.random = Random(seed)
        self.fleet = Fleet()
        self.client = Recorder(b"gateway")
        self.at_decode: dict[bytes, Remote] = {}
        self.at_prefill: dict[bytes, Remote] = {}
        self.kept: dict[bytes, Remote] = {}  # ended at decode; a Resume is still answered
        self.resumes: dict[bytes, tuple[Worker, wire.Resume]] = {}
        # Attempts whose prefill worker the router may not know: decode reports their end.
        self.adopted: set[bytes] = set()
        self.unsure: set[bytes] = set()  # attempts whose end the router may not know
        rules = Rules(mode, 10)
        self.dispatcher = Dispatcher(self.fleet, rules, self.send, Random(seed), 5, 0.0)
        self.started: dict[str, int] = {}
        self.num_workers = 0
        for role in (fleet_pb2.DECODE, fleet_pb2.DECODE, fleet_pb2.PREFILL, fleet_pb2.PREFILL):
            self.join(role)

    def rarely(self) -> bool:
        """Draw true rarely: faults are less frequent than progress, so that requests advance."""
        return self.random.random() < 0.25

    def send(self, worker: Worker, command: Any) -> None:
        kind = command.WhichOneof("command")
        if self.fleet.get(worker.incarnation) is not worker or not (
            worker.connected or kind == "cancel"
        ):
            return  # a cancel is sent in the next session
        if kind == "admit":
            assert worker.hello.role == fleet_pb2.DECODE
            self.at_decode[command.admit.attempt] = Remote(worker, command.admit)
        elif kind == "start":
            assert command.start.attempt in self.at_decode
            self.at_prefill[command.start.attempt] = Remote(worker, command.start)
        elif kind == "resume":
            self.resumes[command.resume.attempt] = (worker, command.resume)
            request = self.dispatcher.attempts[command.resume.attempt]
            if request.state.attempt is not None and request.state.attempt.adopted:
                self.adopted.add(command.resume.attempt)
        elif kind == "cancel" and not command.cancel.choices:
            side = self.at_decode if worker.hello.role == fleet_pb2.DECODE else self.at_prefill
            resume = self.resumes.pop(command.cancel.attempt, None)
            if (resume or command.cancel.attempt in self.unsure) and (
                command.cancel.attempt not in side
            ):
                return  # it cannot know whether the worker still has it
            # Both sides get only attempts that they may still have.
            assert side.pop(command.cancel.attempt).worker is worker
            HITS["cancelled"] += 1

    # --- the world

    @rule(role=st.sampled_from([fleet_pb2.DECODE, fleet_pb2.DECODE, fleet_pb2.PREFILL]))
    def join(self, role: fleet_pb2.Role) -> None:
        self.num_workers += 1
        hello = fleet_pb2.WorkerHello(
            role=role,
            incarnation=self.num_workers.to_bytes(16),
            address=f"10.0.0.{self.num_workers}:1",
            card=pb.ModelCard(
                name="m",
                kv_identity=pb.KvIdentity(digest=b"i"),
                kv_spec=encode_spec(KvSpec(4, ())),
            ),
            transports=["tcp"],
        )
        worker, _ = self.fleet.join(hello, self.now)
        self.dispatcher.joined(worker)
        self.dispatcher.connected(worker, self.now)

    @rule(which=st.integers(0, 5), died=st.booleans())
    def lose(self, which: int, died: bool) -> None:
        workers = list(self.fleet.workers.values())
        if not workers or not self.rarely():
            return
        worker = workers[which % len(workers)]
        for side in (self.at_decode, self.at_prefill):
            for attempt in [a for a, r in side.items() if r.worker is worker]:
                remote = side[attempt]
                self.unsure.add(attempt)
                if died or (side is self.at_decode and not remote.admitted):
                    del side[attempt]
                elif side is self.at_decode:
                    remote.parked = True
        self.resumes = {a: found for a, found in self.resumes.items() if found[0] is not worker}
        worker.connected = False
        if died:
            self.fleet.lost(worker)
        self.dispatcher.disconnected(worker, died, self.now)
        if not died:
            self.dispatcher.connected(worker, self.now)
        HITS["lost"] += 1

    @rule(seconds=st.sampled_from([0.01, 0.2, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.fleet.workers.values():
            self.fleet.heard(worker, self.now)
        self.dispatcher.tick(self.now)

    # --- the client

    @rule(
        target=requests,
        length=st.sampled_from([1, 40, 40]),
        n=st.integers(1, 2),
        queue_ms=st.sampled_from([0, 500, 60_000]),
        remaining_ms=st.sampled_from([0, 5_000, 60_000]),
    )
    def submit(self, length: int, n: int, queue_ms: int, remaining_ms: int) -> str:
        name = f"r{len(self.started)}"
        self.started[name] = 1
        self.issue(name, 1, length, n, queue_ms, remaining_ms)
        return name

    def issue(self, name: str, epoch: int, length: int, n: int, queue: int, left: int) -> None:
        start = pb.Start(
            request=name,
            epoch=epoch,
            model="m",
            params=pb.SamplingParams(n=n),
            queue_remaining_ms=queue,
            remaining_ms=left,
        )
        self.dispatcher.submit(RequestProgress(start, list(range(length))), self.client, self.now)

    @rule(request=requests, step=st.integers(0, 1))
    def issue_again(self, request: str, step: int) -> None:
        if self.client.terminal[request, self.started[request]] or not self.rarely():
            return
        epoch = self.started[request] + step
        self.started[request] = epoch
        self.issue(request, epoch, 40, 1, 0, 0)
        HITS["replaced" if step else "repeated"] += 1

    @rule(request=requests, choices=st.sampled_from([(), (0,), (0, 1)]))
    def cancel(self, request: str, choices: tuple[int, ...]) -> None:
        if self.rarely():
            self.dispatcher.cancel(self.client, request, choices, self.now)

    @rule()
    def gateway_leaves(self) -> None:
        if self.rarely() and self.rarely():
            self.dispatcher.client_gone(self.client, self.now)

    # --- the workers

    def pick(self, side: dict[bytes, Remote], which: int) -> tuple[bytes, Remote] | None:
        return list(side.items())[which % len(side)] if side else None

    @rule(
        which=st.integers(0, 5),
        what=st.sampled_from([*["ok"] * 6, "follows", "follows", *["busy"] * 4, "failed", "gone"]),
    )
    def answer_admit(self, which: int, what: str) -> None:
        waiting = {a: r for a, r in self.at_decode.items() if not r.admitted}
        found = self.pick(waiting, which)
        if found is None:
            return
        attempt, remote = found
        if what in ("ok", "follows"):
            remote.admitted, remote.follows = True, what == "follows"
            admitted = wire.Admitted(attempt=attempt, follows=remote.follows)
            if remote.command.prefill_incarnation and not remote.follows:
                admitted.ticket.id = attempt
            event = wire.DecodeEvent(admitted=admitted)
        else:
            del self.at_decode[attempt]
            failure = pb.Failure(code=pb.INVALID_ARGUMENT, message="no")
            event = {
                "busy": wire.DecodeEvent(busy=wire.Busy(attempt=attempt)),
                "failed": wire.DecodeEvent(failed=pb.Failed(attempt=attempt, failure=failure)),
                "gone": wire.DecodeEvent(gone=wire.Gone(attempt=attempt)),
            }[what]
        HITS[f"admit {what}"] += 1
        self.dispatcher.on_decode(remote.worker, event, self.now)

    @rule(
        which=st.integers(0, 5),
        count=st.integers(1, 4),
        repeat=st.booleans(),
        in_rows=st.booleans(),
    )
    def generate(self, which: int, count: int, repeat: bool, in_rows: bool) -> None:
        running = {
            a: r
            for a, r in self.at_decode.items()
            if r.admitted and not r.parked and not r.follows and a not in self.at_prefill
        }
        found = self.pick(running, which)
        if found is None:
            return
        attempt, remote = found
        start = remote.command.start
        n = max(1, start.params.n)
        had = [len(c.generated_ids) for c in start.choices] or [0] * n
        ended = [bool(c.finish) for c in start.choices] or [False] * n
        for choice in range(n):
            position = remote.sent.get(choice, had[choice])
            if ended[choice] or position >= NUM_TOKENS:
                continue
            end = min(NUM_TOKENS, position + count)
            first = max(0, position - 1) if repeat else position
            tokens = pb.Tokens(
                attempt=attempt,
                choice=choice,
                position=first,
                ids=range(first, end),
                finish=pb.LENGTH if end == NUM_TOKENS else pb.FINISH_REASON_UNSPECIFIED,
            )
            remote.sent[choice] = end
            if in_rows and not tokens.finish:
                named = NumberedChoice(start.request, attempt, start.epoch, choice)
                rows = [(named, at, at) for at in range(first, end)]
                self.dispatcher.on_rows(remote.worker, rows, self.now)
            else:
                event = wire.DecodeEvent(tokens=tokens)
                self.dispatcher.on_decode(remote.worker, event, self.now)
            HITS["tokens"] += 1
        if attempt not in self.at_decode:
            return
        if all(ended[c] or remote.sent.get(c, had[c]) >= NUM_TOKENS for c in range(n)):
            self.kept[attempt] = self.at_decode.pop(attempt)
            finished = pb.Finished(attempt=attempt)
            self.dispatcher.on_decode(remote.worker, wire.DecodeEvent(finished=finished), self.now)

    @rule(which=st.integers(0, 5), attached=st.booleans())
    def end_wait(self, which: int, attached: bool) -> None:
        waiting = {a: r for a, r in self.at_decode.items() if r.follows and not r.parked}
        found = self.pick(waiting, which)
        if found is None:
            return
        attempt, remote = found
        remote.follows = False
        if attached:
            event = wire.DecodeEvent(attached=wire.Attached(attempt=attempt))
        else:
            del self.at_decode[attempt]
            event = wire.DecodeEvent(place_again=wire.PlaceAgain(attempt=attempt, tokens=8))
        HITS["attached" if attached else "placed again"] += 1
        self.dispatcher.on_decode(remote.worker, event, self.now)

    @rule(which=st.integers(0, 5), gone=st.sampled_from([False, False, False, True]))
    def answer_resume(self, which: int, gone: bool) -> None:
        attempts = list(self.resumes)
        if not attempts:
            return
        attempt = attempts[which % len(attempts)]
        worker, resume = self.resumes.pop(attempt)
        remote = self.at_decode.get(attempt) or self.kept.get(attempt)
        if remote is None or gone:
            self.at_decode.pop(attempt, None)
            HITS["resume gone"] += 1
            event = wire.DecodeEvent(gone=wire.Gone(attempt=attempt))
            self.dispatcher.on_decode(worker, event, self.now)
            return
        resumed = wire.Resumed(attempt=attempt, epoch=resume.epoch, follows=remote.follows)
        if attempt in self.at_prefill:
            resumed.ticket.id = attempt
            resumed.prefill_incarnation = remote.command.prefill_incarnation
            HITS["adopted with a ticket"] += 1
        HITS["unparked" if remote.parked else "adopted"] += 1
        remote.parked = False
        self.dispatcher.on_decode(worker, wire.DecodeEvent(resumed=resumed), self.now)
        for choice, end in remote.sent.items():
            first = resume.counts[choice] if choice < len(resume.counts) else 0
            finish = pb.LENGTH if end == NUM_TOKENS else pb.FINISH_REASON_UNSPECIFIED
            ids = range(first, end)
            tokens = pb.Tokens(
                attempt=attempt, choice=choice, position=first, ids=ids, finish=finish
            )
            self.dispatcher.on_decode(worker, wire.DecodeEvent(tokens=tokens), self.now)
        if attempt in self.kept:
            finished = wire.DecodeEvent(finished=pb.Finished(attempt=attempt))
            self.dispatcher.on_decode(worker, finished, self.now)

    @rule(which=st.integers(0, 5))
    def lose_handoff(self, which: int) -> None:
        found = self.pick(self.at_prefill, which)
        if found is None or found[0] not in self.at_decode or not self.rarely():
            return
        remote = self.at_decode.pop(found[0])
        if remote.parked:
            return  # no session
        lost = wire.HandoffLost(attempt=found[0])
        self.dispatcher.on_decode(remote.worker, wire.DecodeEvent(handoff_lost=lost), self.now)
        HITS["handoff lost"] += 1

    @rule(which=st.integers(0, 5), what=st.sampled_from(["done", "done", "failed", "accepted"]))
    def prefill(self, which: int, what: str) -> None:
        found = self.pick(self.at_prefill, which)
        if found is None:
            return
        attempt, remote = found
        if what != "accepted":
            del self.at_prefill[attempt]
        event = {
            "done": wire.PrefillEvent(done=wire.PrefillDone(attempt=attempt)),
            "failed": wire.PrefillEvent(failed=wire.PrefillFailed(attempt=attempt)),
            "accepted": wire.PrefillEvent(accepted=wire.PrefillAccepted(attempt=attempt)),
        }[what]
        self.dispatcher.on_prefill(remote.worker, event, self.now)
        HITS[f"prefill {what}"] += 1

    # --- the oracle

    @invariant()
    def attempts_belong_to_live_requests(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        placer = self.dispatcher.placer
        requests = set(self.dispatcher.requests)
        live = [r.state.attempt for r in requests if r.state.attempt is not None]
        current = {attempt.id for attempt in live}
        assert set(self.dispatcher.attempts) == current
        assert set(placer.promised) <= current
        assert set(self.at_decode) <= current
        assert set(self.at_prefill) - self.adopted <= current
        assert placer.admitting == Counter(a.decode for a in live if not a.answered)
        for worker in self.fleet.workers.values():
            assert set(worker.unreported) <= current
            tokens = sum(tokens for tokens, _ in worker.unreported.values())
            requests_there = worker.load.running + worker.load.waiting + len(worker.unreported)
            assert worker.facts.requests == requests_there
            assert worker.facts.waiting_tokens == worker.load.waiting_tokens + tokens
        queued = set(placer.waiting)
        idle = {r for r in requests if r.state.attempt is None}
        seeking = {r for r in idle if r.state.stage is Stage.SEEKING}
        assert queued | seeking == idle
        assert not queued & seeking
        begun = sum(r.progress.begun for r in requests)
        assert placer.budget.num_under_way <= max(1, begun)
        for request in requests:
            progress, state = request.progress, request.state
            assert (state.begun, state.complete) == (progress.begun, progress.complete)

    @invariant()
    def every_request_is_alive_or_has_ended_once(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        alive = {request.key for request in self.dispatcher.requests}
        for request, epoch in self.started.items():
            ended = self.client.terminal[request, epoch]
            assert ended == ((self.client.key, request) not in alive)

    def teardown(self) -> None:
        """Pass time, which alone ends everything."""
        if not hasattr(self, "dispatcher"):
            return
        self.dispatcher.client_gone(self.client, self.now)
        self.pass_time(6.0)
        assert not self.dispatcher.num_running
        assert not self.dispatcher.attempts
        assert not self.dispatcher.num_queued
        assert not set(self.dispatcher.placer.promised)
        assert not self.at_decode
        assert not set(self.at_prefill) - self.adopted
