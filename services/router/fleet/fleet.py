"""The router's view of its workers and of the models that they serve; pure, time is an argument.

    (join) -> LIVE <-> SUSPECT -> dead (forgotten)
    LIVE -> SUSPECT      its join stream ended, or 1 s of silence on it
    SUSPECT -> LIVE      a message on a join stream of the same incarnation
    SUSPECT -> dead      500 ms without a message on its session either
    any -> dead          connection refused; another incarnation at its address; drained, and both
                         its join stream and its session ended
    LIVE -> DRAINING     it drains: no new work, running work continues
    LIVE -> LEAVING      it deregisters from this router only (worker/membership.py): no new work;
                         forgotten when it runs nothing of this router any more
    LEAVING -> LIVE      it has joined again
    LIVE, LEAVING, DRAINING -> FROZEN   its engine's counter stands still although it has work
    FROZEN -> LIVE, LEAVING, DRAINING   the counter moves, or it has no work

A suspect worker gets no new work and keeps its running work. A frozen worker gets no new work
either, and its requests are retried on other workers, as after its death; its process lives, so it
receives the cancels and acts on them once its engine makes progress again. Only `Fleet` adds and
forgets workers.

When more than half of four or more workers are suspect at once, the router itself is probably cut
off from the network. Until it hears from enough workers again, or for ISOLATED_S, no worker counts
as dead because of its silence, and the router refuses new requests. After a pause of the router
process it accepts them for RESUMED_S, in which its workers join again.
"""

from collections.abc import Sequence

from pdserve.protos import fleet_pb2 as pb
from pdserve.services.router.fleet.prefix_index import MAX_INDEXED_BLOCKS, PrefixIndex
from pdserve.services.router.fleet.worker import State, Worker

RETIRED_S = 900.0  # as long as an alert reports the model as not served
SILENCE_S = 1.0
SUSPECT_S = 0.5
RESUMED_S = 2.0  # twice the time in which workers notice that their router is back
ISOLATED_S = 15.0  # then they are dead after all, as when a rack loses power
MIN_ISOLATED = 4  # workers; of fewer, half may really be gone


class ServedModels:
    """Names of the models that the router serves or served recently. A name is known once a decode
    worker of the model registers. It is forgotten RETIRED_S after the model's last decode worker
    left for good, and kept while that worker is expected back. Pure: time is an argument."""

    def __init__(self) -> None:
        self._retired: dict[str, float | None] = {}  # time of retirement by name; None: served

    def __contains__(self, name: str) -> bool:
        return name in self._retired

    def __bool__(self) -> bool:
        return bool(self._retired)

    @property
    def names(self) -> list[str]:
        return sorted(self._retired)

    def joined(self, name: str) -> None:
        """Record that a decode worker of the model registered."""
        self._retired[name] = None

    def left(self, name: str, expected_back: bool, now: float) -> None:
        """Record that the model's last decode worker is gone. Its name is forgotten after
        RETIRED_S, unless the worker is expected back."""
        self._retired[name] = None if expected_back else now

    def tick(self, now: float) -> None:
        """Forget the models whose last decode worker left RETIRED_S ago or earlier."""
        for name, since in list(self._retired.items()):
            if since is not None and now - since >= RETIRED_S:
                del self._retired[name]


class Fleet:
    """The router's workers by incarnation, with their states. Methods that remove workers return
    them, so that the caller can end the attempts on them."""

    def __init__(self, prefix_index_hashes: int = MAX_INDEXED_BLOCKS) -> None:
        """Construct a fleet without workers. `prefix_index_hashes`: maximum number of different KV
        blocks in the index of the workers' prefix caches."""
        self.workers: dict[bytes, Worker] = {}
        self.prefixes = PrefixIndex(prefix_index_hashes)
        self._of: dict[tuple[pb.Role, str], list[Worker]] = {}
        self.isolated_since: float | None = None  # since when it hears too few of its workers
        self._resumed = -RESUMED_S  # end of the last pause of the router process
        self.sharded = False  # some decode workers join only some routers, or the last ones did
        self._leases = 0
        self._next_look = 0.0  # no worker is silent for too long before this time
        self._has_leaving = False

    def get(self, incarnation: bytes) -> Worker | None:
        return self.workers.get(incarnation)

    def of(self, role: pb.Role, model: str) -> Sequence[Worker]:
        """Return the workers of a role and model, in any state. The returned list never changes: a
        new list replaces it when workers come or go."""
        return self._of.get((role, model), ())

    def join(self, hello: pb.WorkerHello, now: float) -> tuple[Worker, list[Worker]]:
        """Register the worker of a new join stream. Returns the worker, and the earlier
        incarnations at its address, which are forgotten."""
        self._leases += 1
        replaced = [
            w
            for w in self.workers.values()
            if w.address == hello.address and w.incarnation != hello.incarnation
        ]
        for worker in replaced:
            self._forget(worker)
        member = self.workers.get(hello.incarnation)
        if member is None:
            member = Worker(hello, self._leases, now, now, self.prefixes.open(hello.incarnation))
            self.workers[hello.incarnation] = member
            self._group()
        else:
            member.lease = self._leases
            member.leaving = False
            member.heard = member.witnessed = now
            member.set_state()
        return member, replaced

    def heard(self, worker: Worker, now: float) -> None:
        """Record that a report arrived on the worker's join stream, so that the worker is not
        suspect."""
        worker.heard = worker.witnessed = now
        if worker.state is State.SUSPECT:
            worker.set_state()

    def beat(self, worker: Worker, heartbeat: pb.Heartbeat, now: float) -> bool:
        """Check by a heartbeat whether the worker's engine makes progress. Returns whether the
        engine has just frozen or recovered."""
        was_frozen = worker.frozen
        worker.frozen = worker.engine.look(heartbeat.step, heartbeat.busy, now)
        worker.set_state()
        return worker.frozen is not was_frozen

    def witnessed(self, worker: Worker, now: float) -> None:
        """Record that a message of the worker arrived on another stream than its join stream. A
        suspect worker stays suspect, but it is not dead."""
        worker.witnessed = now

    def deregister(self, worker: Worker, leaves: bool = False) -> None:
        """Record that the worker gets no new work from now on, because it drains or (`leaves`)
        deregisters from this router only."""
        if leaves:
            worker.leaving = self._has_leaving = True
        else:
            worker.draining = True
        if worker.state in (State.LIVE, State.LEAVING):
            worker.set_state()

    def stream_ended(self, worker: Worker, lease: int, now: float) -> list[Worker]:
        """Process the end of a worker's join stream: suspect the worker, or forget it if it had
        deregistered and its session has ended too. Ignored unless the stream is the worker's
        newest. Returns the workers that were forgotten."""
        if self.workers.get(worker.incarnation) is not worker or worker.lease != lease:
            return []
        worker.lease = 0
        if not worker.stays and not worker.connected:  # else its last events may still arrive
            return self.lost(worker)
        if not worker.goes_on_alone:
            self._suspect(worker, now)
        return []

    def lost(self, worker: Worker) -> list[Worker]:
        """Forget a worker that is known to be gone, for example because its port refuses
        connections. Returns the forgotten worker in a list, which is empty if it was forgotten
        before."""
        if self.workers.get(worker.incarnation) is not worker:
            return []
        self._forget(worker)
        return [worker]

    def _forget(self, worker: Worker) -> None:
        del self.workers[worker.incarnation]
        self._group()
        worker.prefixes.close()

    def _group(self) -> None:
        self._of = {}
        for worker in self.workers.values():
            self._of.setdefault((worker.role, worker.model), []).append(worker)
        decodes = [w.hello.join_routers for w in self.workers.values() if w.role == pb.DECODE]
        if decodes:
            self.sharded = any(decodes)

    def excuse(self, seconds: float, now: float) -> None:
        """Discount a pause of the router process of `seconds`, so that it does not count as silence
        of workers. The messages that workers sent during the pause are read after this call."""
        self._resumed = now
        for worker in self.workers.values():
            worker.heard = min(now, worker.heard + seconds)
            worker.suspect_since = min(now, worker.suspect_since + seconds)
        if self.isolated_since is not None:
            self.isolated_since = min(now, self.isolated_since + seconds)

    def tick(self, now: float) -> list[Worker]:
        """Let time pass: suspect silent workers, and forget those that were silent for too long.
        Returns the forgotten workers, which count as dead."""
        if now < self._next_look and self.isolated_since is None:
            return []
        suspects = []
        for worker in self.workers.values():
            silent = now - worker.heard >= SILENCE_S and not worker.goes_on_alone
            if worker.state is not State.SUSPECT and silent:
                self._suspect(worker, now)
            if worker.state is State.SUSPECT:
                suspects.append(worker)
        if suspects or self.isolated_since is not None:
            self._check_isolation(suspects, now)
        else:
            heard = min((worker.heard for worker in self.workers.values()), default=now)
            self._next_look = heard + SILENCE_S
        since = self.isolated_since
        if since is not None and now - since < ISOLATED_S:
            return []
        overdue = [
            worker
            for worker in suspects
            if now - max(worker.suspect_since, worker.witnessed) >= SUSPECT_S
        ]
        return [dead for worker in overdue for dead in self.lost(worker)]

    def _check_isolation(self, suspects: list[Worker], now: float) -> None:
        """Record since when more than half of the workers are suspect, which means that the router
        is isolated. When the isolation ends, the workers that are still suspect get their full time
        again before they count as dead, because their messages may still arrive."""
        staying = [w for w in self.workers.values() if w.was_connected and w.stays]
        suspects = [w for w in suspects if w.was_connected and w.stays]
        if len(staying) >= MIN_ISOLATED and 2 * len(suspects) > len(staying):
            if self.isolated_since is None:
                self.isolated_since = now
        elif self.isolated_since is not None:
            self.isolated_since = None
            for worker in suspects:
                worker.suspect_since = now

    @property
    def isolated(self) -> bool:
        """Whether the router itself is probably cut off from the network, since more than half of
        its workers are silent."""
        return self.isolated_since is not None

    def refuses(self, now: float) -> bool:
        """Return whether to refuse new requests: the router is isolated, and not only because its
        process was paused until now."""
        return self.isolated and now - self._resumed >= RESUMED_S

    def leaving(self) -> list[Worker]:
        """Return the workers that have deregistered from this router only and keep serving other
        routers."""
        leaving = [w for w in self.workers.values() if w.leaving] if self._has_leaving else []
        self._has_leaving = bool(leaving)
        return leaving

    def _suspect(self, worker: Worker, now: float) -> None:
        self._next_look = now
        if worker.state is not State.SUSPECT:
            worker.state = State.SUSPECT
            worker.suspect_since = now
