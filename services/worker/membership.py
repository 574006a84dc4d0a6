"""Registers a worker with routers by a Fleet.Join stream (a lease) to each router, or to the first
`join_routers` of them in rendezvous order.

Leases run on threads besides the event loop, so that a worker whose event loop or engine is busy
does not look dead. Every method may be called from any thread. A lease sends the worker's
description (hello), then the hashes in its prefix cache, then changes of the cache, load reports
and heartbeats.

With `join_routers`, a router that refuses this worker, or has not accepted it for ABSENT_S, is
retried but does not count, so the next router in the order is joined too. Once enough of the first
routers have accepted the worker and SETTLED_S have passed, the worker deregisters from the other
routers. These send no new requests to it, their running requests continue, and each ends its lease
when none of its requests remains. So deregistration ends or recomputes no stream.

A router that has received nothing for a second suspects that the worker is dead, so heartbeats are
sent at least twice a second. A load report includes a heartbeat if the router reads it there, so a
busy worker sends few separate ones. Separate heartbeats are sent at fixed slots of the wall clock:
a router wakes once for the heartbeats of many workers, which halves its cost.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import grpc

from pdserve.protos import fleet_pb2 as pb
from pdserve.protos.common_pb2 import INCOMPATIBLE_VERSION
from pdserve.protos.fleet_pb2_grpc import FleetStub
from pdserve.services.common.auth.access import Access
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.discovery import Discovery, first_that_count, rendezvous_order
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import check_version
from pdserve.services.worker.settings import DEREGISTER_S

log = logging.getLogger(__name__)

RESOLVE_S = 1.0
SILENT_S = 5.0  # without a heartbeat's echo, after which the router is joined again
REJOIN_S = 0.1  # least time between two checks of the leases
ANNOUNCE_S = 0.5  # for the routers to be sent the announced drain
REFUSED_S = 0.5  # between two tries at a router of another version, doubled with each ...
MAX_REFUSED_S = 10.0  # ... up to this: one of the two is to be upgraded
ABSENT_S = 3.0  # a router that has not accepted the worker for this long does not count
SETTLED_S = 5.0  # since the last router accepted the worker: ignores routers that come and go
HASHES_PER_EVENT = 2048  # a router takes in about 1 us for each


HEARTBEAT_S = 0.44  # most time since the last heartbeat, in a load or alone
SLOT_S = HEARTBEAT_S / 4
ROUNDING = 1e-3  # of a slot
BEAT_S = 0.1  # least time between two in loads: routers count their looks at the engine
LOAD_INTERVAL_S = 0.05  # least time between two loads if one of LOAD_FIELDS has changed ...
STEADY_INTERVAL_S = 0.1  # ... and if only blocks and counters have changed
# Fields that change when requests come, go or wait, not with every token.
LOAD_FIELDS = (
    "running",
    "waiting",
    "waiting_tokens",
    "blocks_held",
    "blocks_reserved",
    "preemptions",
    "last_command",
)


class WorkerReports:
    """The reports that one lease sends after its hello (loads, prefix cache changes, heartbeats,
    goodbye), and when each is due. Any thread may add reports; one thread takes them. Callers pass
    the time."""

    def __init__(self, heartbeat: Callable[[], pb.Heartbeat]) -> None:
        self.wall_offset = 0.0  # from the clock of `now` to the wall clock
        self._heartbeat = heartbeat
        self._lock = threading.Lock()  # guards the load and the goodbye
        self._load: pb.Load | None = None
        self._goodbye: pb.Goodbye | None = None
        self.goodbye_sent = threading.Event()
        self._prefixes: deque[pb.PrefixEvents] = deque()
        self._last_load = pb.Load()
        self._last_load_at = self._last_beat_at = self._next_beat = -math.inf

    def add_load(self, load: pb.Load) -> None:
        """Set the load to send next; it replaces one that is not sent yet."""
        with self._lock:
            self._load = load

    def add_prefixes(self, events: Sequence[pb.PrefixEvents]) -> None:
        """Queue changes of the prefix cache; all are sent, in order."""
        self._prefixes.extend(events)

    def add_goodbye(self, goodbye: pb.Goodbye) -> None:
        """Set the message by which the worker announces to this router that it drains or
        deregisters."""
        with self._lock:
            self._goodbye = goodbye

    def due(self, now: float) -> Iterator[pb.WorkerReport]:
        """Remove and yield the reports that are due at the time `now`."""
        with self._lock:
            goodbye, self._goodbye = self._goodbye, None
        if goodbye is not None:
            yield pb.WorkerReport(goodbye=goodbye)
            self.goodbye_sent.set()  # gRPC takes the next report once it has sent this one
        while self._prefixes:
            yield pb.WorkerReport(prefixes=self._prefixes.popleft())
        load = self._take_load(now)
        if load is not None:
            merges = now >= self._last_beat_at + BEAT_S
            yield pb.WorkerReport(load=load, load_beat=self._beat(now) if merges else None)
        if now >= self._next_beat:
            yield pb.WorkerReport(heartbeat=self._beat(now))

    def next_due(self) -> float:
        """Return the time at which the next report is due, if none is added before."""
        return min(self._next_beat, self._load_due())

    def _beat(self, now: float) -> pb.Heartbeat:
        self._last_beat_at = now
        slot = math.floor((now + HEARTBEAT_S + self.wall_offset) / SLOT_S + ROUNDING)
        self._next_beat = slot * SLOT_S - self.wall_offset
        return self._heartbeat()

    def _load_due(self) -> float:
        load = self._load
        if load is None:
            return math.inf
        return self._last_load_at + load_interval_s(self._last_load, load)

    def _take_load(self, now: float) -> pb.Load | None:
        with self._lock:
            if now < self._load_due():
                return None
            load, self._load = self._load, None
        if load is not None:
            self._last_load, self._last_load_at = load, now
        return load


def load_interval_s(last_load: pb.Load, load: pb.Load) -> float:
    """Return the least seconds between sending `last_load` and `load`: longer if the load is
    steady."""
    steady = all(getattr(last_load, name) == getattr(load, name) for name in LOAD_FIELDS)
    return STEADY_INTERVAL_S if steady else LOAD_INTERVAL_S


class _Lease:
    """A worker's registration with one router: one Fleet.Join stream. A gRPC thread iterates over
    the reports, and so also sends the heartbeats."""

    def __init__(self, owner: "Membership", address: str, access: Access) -> None:
        self._owner = owner
        self.address = address
        self._access = access
        self._pending_reports = WorkerReports(owner.heartbeat)
        self._wake = threading.Event()
        self._closed = False
        self._call: grpc.Call | None = None
        self._heard = time.monotonic()
        self.welcomed = 0.0  # when the router accepted the worker; 0: not yet
        self.leaving = False
        self._thread = threading.Thread(target=self._run, name=f"join {address}", daemon=True)

    def start(self, prefixes: list[pb.PrefixEvents], load: pb.Load | None) -> None:
        self._pending_reports.add_prefixes(prefixes)
        if load is not None:
            self._pending_reports.add_load(load)
        self._pending_reports.wall_offset = time.time() - time.monotonic()
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def load(self, load: pb.Load) -> None:
        self._pending_reports.add_load(load)
        self._wake.set()

    def prefixes(self, events: list[pb.PrefixEvents]) -> None:
        self._pending_reports.add_prefixes(events)
        self._wake.set()

    def announce_drain(self, reason: str) -> None:
        self._pending_reports.add_goodbye(pb.Goodbye(reason=reason))
        self._wake.set()

    def wait_announced(self, timeout_s: float) -> None:
        """Wait until the router has been sent the announced drain, at most `timeout_s`."""
        if self.alive():
            self._pending_reports.goodbye_sent.wait(max(0.0, timeout_s))

    def leave(self) -> None:
        """Deregister from this router, which ends the lease once none of its requests runs on this
        worker."""
        if not self.leaving:
            log.info("deregistering from router %s, since other routers replace it", self.address)
            self.leaving = True
            self._pending_reports.add_goodbye(
                pb.Goodbye(reason="it uses other routers", leaves=True)
            )
            self._wake.set()

    def close(self) -> None:
        """Begin to end the Join stream at once; use `wait` to wait for its end."""
        self._closed = True
        self._wake.set()
        if self._call is not None:
            self._call.cancel()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the Join stream; return whether it has ended within `timeout_s`."""
        self._thread.join(timeout=max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _reports(self) -> Iterator[pb.WorkerReport]:
        yield pb.WorkerReport(hello=self._owner.hello)
        while not self._closed:
            # Cleared first, so that a change after `due` wakes the next wait.
            self._wake.clear()
            now = time.monotonic()
            if now - self._heard > SILENT_S and self._call is not None:
                self._call.cancel()
                return
            yield from self._pending_reports.due(now)
            self._wake.wait(max(0.0, self._pending_reports.next_due() - time.monotonic()))

    def _run(self) -> None:
        try:
            with self._access.open_blocking_channel(self.address, Role.ROUTER) as channel:
                self._join(channel)
        except OSError as error:  # a certificate cannot be read
            self._owner.note(self.address, str(error))
        finally:
            self._closed = True
            self._wake.set()
            self._owner.lease_ended()

    def _join(self, channel: grpc.Channel) -> None:
        call = FleetStub(channel).Join(self._reports(), metadata=self._access.metadata)
        self._call = call
        if self._closed:
            call.cancel()
        try:
            for reply in call:
                self._heard = time.monotonic()
                if reply.HasField("welcome"):
                    self._welcomed(reply.welcome)
        except grpc.RpcError as error:
            if not self._closed:
                self._failed(ServiceError.from_rpc(error))
        except ServiceError as error:
            call.cancel()
            self._failed(error)

    def _welcomed(self, welcome: pb.Welcome) -> None:
        """Record that the router has accepted the worker. Raises ServiceError if the router's
        protocol version is too old or too new."""
        check_version(welcome.protocol, "worker", f"router {self.address}")
        log.info("registered with router %s (protocol version %d)", self.address, welcome.protocol)
        self.welcomed = time.monotonic()
        self._owner.note(self.address, "")

    def _failed(self, error: ServiceError) -> None:
        if error.code == INCOMPATIBLE_VERSION:
            self._owner.refused(self.address)
        self._owner.note(self.address, str(error))


class Membership:
    """Keeps a worker registered with its routers until closed.

    `routers` are targets (docs/discovery.md), which are resolved again every second. Routers that
    are not ready are joined too, so that they know the workers once they are ready. `liveness`
    returns the engine's step counter and whether the engine is busy. Changes of the prefix cache
    are numbered by one sequence per worker, which counts hashes.
    """

    def __init__(
        self,
        hello: pb.WorkerHello,
        routers: Sequence[str],
        access: Access,
        liveness: Callable[[], tuple[int, bool]] = lambda: (0, False),
    ) -> None:
        self.hello = hello
        self._liveness = liveness
        self._access = access
        self._lock = threading.Lock()  # guards the fields below
        self._leases: dict[str, _Lease] = {}
        self._hashes: dict[bytes, None] = {}
        self._sequence = 0
        self._load: pb.Load | None = None
        self._drain_reason: str | None = None
        self._problems: dict[str, str] = {}  # the reason why a router is not joined, by address
        # Routers of another version: time of the next try, and the pause after it.
        self._refused: dict[str, tuple[float, float]] = {}
        self._missed: dict[str, float] = {}  # since when a target router is not joined
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._discovery = Discovery("--routers", routers, self._changed.set, ready_only=False)
        self._thread = threading.Thread(target=self._resolve_forever, name="join", daemon=True)

    def heartbeat(self) -> pb.Heartbeat:
        """Make a heartbeat: the engine's current step counter, and whether the engine has work."""
        counter, busy = self._liveness()
        return pb.Heartbeat(step=counter, busy=busy)

    def start(self) -> None:
        """Start to register with the routers; `hello` must be complete."""
        self._thread.start()

    def report(self, load: pb.Load) -> None:
        """Send the newest load to all joined routers, at most 20 times a second, or 10 if it is
        steady."""
        with self._lock:
            self._load = load
            leases = list(self._leases.values())
        for lease in leases:
            lease.load(load)

    def prefixes(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Send the block hashes that were added to and removed from the prefix cache to all joined
        routers. A hash in both lists was removed after it was added."""
        if not added and not removed:
            return
        with self._lock:
            self._hashes.update(dict.fromkeys(added))
            for chain in removed:
                self._hashes.pop(chain, None)
            events = self._events(added, removed)
            for lease in self._leases.values():
                lease.prefixes(events)

    def _events(self, added: Sequence[bytes], removed: Sequence[bytes]) -> list[pb.PrefixEvents]:
        events = []
        for field, hashes in (("added", added), ("removed", removed)):
            for start in range(0, len(hashes), HASHES_PER_EVENT):
                part = hashes[start : start + HASHES_PER_EVENT]
                event = pb.PrefixEvents(sequence=self._sequence)
                getattr(event, field).extend(part)
                events.append(event)
                self._sequence += len(part)
        return events

    def announce_drain(self, reason: str = "drain") -> None:
        """Ask all routers, including those joined later, to send no new work to this worker."""
        with self._lock:
            self._drain_reason = reason
            for lease in self._leases.values():
                lease.announce_drain(reason)

    def wait_announced(self, timeout_s: float = ANNOUNCE_S) -> None:
        """Wait until all routers have been sent the announced drain, at most `timeout_s`. A router
        that does not know of it takes the end of the worker's streams for its death."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            leases = list(self._leases.values())
        for lease in leases:
            lease.wait_announced(deadline - time.monotonic())

    def close(self, timeout_s: float = DEREGISTER_S) -> None:
        """End all leases at once; the routers see that the streams have ended.

        Returns after at most `timeout_s`. A name lookup has no time limit, so the thread that
        resolves names may still run then; it opens no more leases.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stop.set()
            leases = list(self._leases.values())
        self._changed.set()
        self._discovery.close()
        for lease in leases:
            lease.close()
        ended = [lease.wait(deadline - time.monotonic()) for lease in leases]
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if not all(ended):
            log.warning(
                "the leases (Join streams) with %d routers did not end in time",
                ended.count(False),
            )

    def note(self, address: str, problem: str) -> None:
        """Log why registering with a router fails, once per reason. `problem` is the reason; empty
        if the worker is registered."""
        with self._lock:
            previous = self._problems.get(address, "")
            self._problems[address] = problem
            if not problem:
                self._refused.pop(address, None)
        if problem not in ("", previous):
            log.warning("cannot register with router %s: %s; retrying", address, problem)

    def refused(self, address: str) -> None:
        """Delay the next try to register with a router whose protocol version is too far from this
        worker's."""
        with self._lock:
            _, pause = self._refused.get(address, (0.0, REFUSED_S))
            self._refused[address] = time.monotonic() + pause, min(MAX_REFUSED_S, 2 * pause)

    def lease_ended(self) -> None:
        """Have the thread check the leases soon, because one has ended."""
        self._changed.set()

    def _resolve_forever(self) -> None:
        while not self._stop.is_set():
            addresses = {
                address for resolved in self._discovery.look().values() for address in resolved
            }
            with self._lock:
                if self._stop.is_set():
                    return
                self._leases = {a: lease for a, lease in self._leases.items() if lease.alive()}
                gone = (self._refused.keys() | self._problems.keys()) - addresses
                for address in gone - self._leases.keys():
                    self._refused.pop(address, None)
                    self._problems.pop(address, None)
                now = time.monotonic()
                targets = self._target_routers(addresses, now)
                delayed = {a for a, (retry_at, _) in self._refused.items() if now < retry_at}
                for address in sorted(targets - self._leases.keys() - delayed):
                    self._leases[address] = self._new_lease(address)
                self._leave_others(targets, now)
            self._changed.wait(RESOLVE_S)
            self._changed.clear()
            self._stop.wait(REJOIN_S)

    def _target_routers(self, addresses: set[str], now: float) -> set[str]:
        """Return the addresses of the routers with which the worker should be registered."""
        num_routers = self.hello.join_routers
        if not num_routers:
            return addresses

        def counts(address: str) -> bool:
            absent = address in self._refused or now - self._missed.get(address, now) >= ABSENT_S
            return address in joined or not absent

        joined = {a for a, lease in self._leases.items() if lease.welcomed and not lease.leaving}
        order = rendezvous_order(self.hello.incarnation, addresses)
        targets = set(first_that_count(order, num_routers, counts))
        self._missed = {a: self._missed.get(a, now) for a in targets - joined}
        return targets

    def _leave_others(self, targets: set[str], now: float) -> None:
        """Deregister from routers outside `targets`, once enough of the targets have accepted the
        worker. End the lease of a target from which the worker has been deregistering, so that it
        is joined again."""
        num_routers = self.hello.join_routers
        if not num_routers or self._drain_reason is not None:
            return
        for address in targets & self._leases.keys():
            if self._leases[address].leaving:
                self._leases[address].close()
        joined = {a: lease.welcomed for a, lease in self._leases.items() if lease.welcomed}
        welcome_times = [welcomed for address, welcomed in joined.items() if address in targets]
        if len(welcome_times) >= num_routers and now - max(welcome_times) >= SETTLED_S:
            for address in joined.keys() - targets:
                self._leases[address].leave()

    def _new_lease(self, address: str) -> _Lease:
        lease = _Lease(self, address, self._access)
        # The state so far gets sequence numbers that end just before the next change.
        hashes = list(self._hashes)
        state = []
        for start in range(0, max(1, len(hashes)), HASHES_PER_EVENT):
            part = hashes[start : start + HASHES_PER_EVENT]
            sequence = self._sequence - len(hashes) + start
            state.append(pb.PrefixEvents(sequence=sequence, reset=start == 0, added=part))
        if self._drain_reason is not None:
            lease.announce_drain(self._drain_reason)
        lease.start(state, self._load)
        return lease
