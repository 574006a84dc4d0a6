"""The fault matrix: kinds of faults, the phases in which each can strike, and their implementation.

A fault waits until its request reaches its phase (phases.py), never for a time. It counts as hit
only if the object that it breaks existed. The file is long because it has the table of faults and a
method for each.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from pdserve.engine.api import Request, SamplingParams
from pdserve.engine.handoff.protocol import messages
from pdserve.engine.handoff.protocol.frames import FRAME_BYTES
from pdserve.engine.kv import KvIdentity
from pdserve.protos import worker_pb2 as wire
from pdserve.services.router.fleet.fleet import SILENCE_S
from simulation.clock import Process, State
from simulation.cluster import Cluster
from simulation.network import Message
from simulation.phases import PHASES, REQUESTED, PhaseWatch
from simulation.scenario import DEAF, Fault

ROLES = ("gateway", "router", "prefill", "decode")
PAIRS = (
    ("gateway", "router"), ("router", "prefill"), ("router", "decode"), ("prefill", "decode"),
)  # fmt: skip
BREAKS = ("drop", "delay", "one-way partition", "reset", "half-open")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
STOP_S = 10.0

KINDS = (
    "client closes", "client stops reading", "deadline",
    *(f"{name} {role}" for name in SIGNALS for role in ROLES),
    *(f"{how} {one}-{other}" for how in BREAKS for one, other in PAIRS),
    "duplicate message", "reordered message", "late message",
    "bit flip", "truncation", "replay of a frame",
    "engine hangs prefill", "engine hangs decode",
    "stale incarnation", "other weights", "no blocks at decode", "no blocks at prefill",
    "router restart", "all prefill gone", "all decode gone", DEAF,
)  # fmt: skip

# After these faults a request may end with an error that its client caused or was informed of.
MAY_FAIL = ("client closes", "deadline", "SIGKILL gateway")

# After these faults the workers keep all they had: no prompt token is computed twice.
NOTHING_AGAIN = ("SIGKILL router", "SIGTERM router", "router restart", DEAF)


def unreachable(kind: str, phase: str) -> str:
    """Return why a cell of the matrix cannot be hit, or "" if it can."""
    no_frames = "only a frame on its way can be changed, and none of the attempt is"
    if kind in ("bit flip", "truncation"):
        return "" if phase in ("computing", "transferring", "followed") else no_frames
    if kind == "other weights" and phase not in ("queued", "claimed"):
        return "identities are compared at PrefillStart and in the introduction only"
    if kind == "no blocks at prefill" and phase not in ("admitted", "queued"):
        return "from its first chunk on the prompt has all its blocks at prefill"
    if kind == "no blocks at decode" and phase == "last":
        return "nothing is allocated after the last token"
    if phase == "last" and kind in ("client closes", "client stops reading", "deadline"):
        return "the answer is complete at decode: for the client this is decoding"
    return ""


def cells() -> list[tuple[str, str]]:
    """Return (kind, phase) of every cell that can be hit."""
    return [(k, p) for k in KINDS for p in PHASES if not unreachable(k, p)]


@dataclass(slots=True)
class Strike:
    """One fault of the scenario and its outcome."""

    fault: Fault
    rng: Random
    fired: bool = False
    hit: bool = False
    phase: str = ""  # the phase in which it hit
    at_s: float = 0.0


class Faults:
    """Waits for the phases of a run and strikes."""

    def __init__(self, cluster: Cluster, watch: PhaseWatch) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._network = cluster.network
        self.watch = watch
        self.calm_at = 0.0  # when the last effect of a fault ends
        faults = cluster.scenario.faults
        self.strikes = [Strike(f, Random(f"fault {f.seed} {i}")) for i, f in enumerate(faults)]
        self._armed: list[Callable[[Message], bool]] = []  # wait for a message; True when done

    def on_message(self, message: Message) -> None:
        self._armed = [act for act in self._armed if not act(message)]

    def on_phase(self, request: str, phase: str, index: int, message: Message | None) -> None:
        for strike in self.strikes:
            fault = strike.fault
            if strike.fired or fault.request != request:
                continue
            wanted = (
                REQUESTED
                if (fault.kind, fault.phase) == ("other weights", "queued")
                else fault.phase
            )
            if fault.kind == "other weights" and fault.phase == "claimed":
                wanted = REQUESTED
            if phase == wanted and index >= fault.index:
                strike.fired, strike.at_s = True, self._world.now
                self._strike(strike, message)

    def _strike(self, strike: Strike, message: Message | None) -> None:
        kind = strike.fault.kind
        head, _, rest = kind.partition(" ")
        strike.phase = strike.fault.phase
        if head in SIGNALS:
            self._signal(strike, head, rest)
        elif any(kind.startswith(how) for how in BREAKS):
            self._break(strike, kind)
        elif kind.endswith("message"):
            self._message(strike, kind, message)
        elif kind in ("bit flip", "truncation", "replay of a frame"):
            self._frame(strike, kind, message)
        else:
            {
                "client closes": self._close_client,
                "client stops reading": self._pause_client,
                "deadline": lambda strike: None,  # part of the request
                "engine hangs prefill": lambda strike: self._hang(strike, "prefill"),
                "engine hangs decode": lambda strike: self._hang(strike, "decode"),
                "stale incarnation": self._stale_incarnation,
                "other weights": lambda strike: self._other_weights(strike, message),
                "no blocks at decode": lambda strike: self._hog(strike, "decode"),
                "no blocks at prefill": lambda strike: self._hog(strike, "prefill"),
                "router restart": self._restart_router,
                "all prefill gone": lambda strike: self._all_gone(strike, "prefill", 5.0),
                "all decode gone": lambda strike: self._all_gone(strike, "decode", 2.0),
                DEAF: self._deafen_router,
            }[kind](strike)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule an action of the supervisor; the run is not calm before it."""
        self.calm_at = max(self.calm_at, self._world.now + delay_s)
        self._world.after(delay_s, self._cluster.supervisor, act)

    def _name(self, strike: Strike, role: str) -> str:
        return self.watch.places.get(strike.fault.request, {}).get(role, "")

    def _runtime(self, strike: Strike, role: str) -> Any:
        """Return the worker of the request, or None if it is dead or still loading."""
        victim = self._name(strike, role)
        process = self._cluster.nodes[victim].process if victim else None
        if process is None or not process.alive or process.service is None:
            return None
        return process.service.runtime

    def _hit(self, strike: Strike) -> None:
        strike.hit = True

    # clients

    def _close_client(self, strike: Strike) -> None:
        reply = self._cluster.replies[strike.fault.request]

        def leave() -> None:
            if not reply.over and reply.task is not None:
                self._hit(strike)
                reply.left = True
                reply.task.cancel()

        self._later(0.0, leave)

    def _pause_client(self, strike: Strike) -> None:
        reply = self._cluster.replies[strike.fault.request]
        if not reply.over:
            self._hit(strike)
            reply.paused = asyncio.Event()
            self._later(strike.rng.uniform(0.5, 8.0), reply.paused.set)

    # processes

    def _signal(self, strike: Strike, name: str, role: str) -> None:
        victim = self._name(strike, role)
        if not victim or not self._cluster.nodes[victim].process.alive:
            return
        process = self._cluster.nodes[victim].process
        self._hit(strike)
        if name == "SIGTERM":
            self._later(0.0, lambda: process.signal(signal.SIGTERM))
            if role != "gateway":
                self._wait_for_exit(victim, process)
        elif strike.rng.random() < 0.5:  # including the message about to be sent
            self._end(strike, name, victim, process)
        else:
            self._later(0.0, lambda: self._end(strike, name, victim, process))

    def _end(self, strike: Strike, name: str, victim: str, process: Process) -> None:
        if name == "SIGKILL":
            self._kill(victim, strike.rng.uniform(0.2, 2.0))
        elif process.state is State.RUNNING:
            process.state = State.STOPPED
            self._network.stopped(process)
            self._later(STOP_S, lambda: self._world.resume(process))

    def _kill(self, victim: str, back_s: float) -> None:
        node = self._cluster.nodes[victim]
        node.process.kill()
        if node.role == "gateway":
            node.expected = False
        else:
            self._later(back_s, lambda: self._cluster.launch(victim))

    def _wait_for_exit(self, victim: str, process: Process) -> None:
        def look() -> None:
            if process.alive:
                self._later(0.1, look)
            else:
                self._cluster.launch(victim)

        self._later(0.1, look)

    def _hang(self, strike: Strike, role: str) -> None:
        """Stop the engine for a while, in a process that lives and answers. The time is shorter or
        longer than the detection of a frozen engine takes."""
        part = self._runtime(strike, role)
        if part is None:
            return
        self._hit(strike)
        part.thread.hang()
        self._later(strike.rng.choice((1.0, 5.0, 12.0, 30.0)), part.thread.thaw)

    def _stale_incarnation(self, strike: Strike) -> None:
        """Replace a worker at its address before its end is noticed."""
        role = strike.rng.choice(("decode", "decode", "prefill"))
        victim = self._name(strike, role)
        if victim:
            self._hit(strike)
            self._later(0.0, lambda: self._kill(victim, 0.0))

    def _restart_router(self, strike: Strike) -> None:
        victim = self._name(strike, "router")
        self._hit(strike)
        self._later(0.0, lambda: self._kill(victim, 0.1))

    def _all_gone(self, strike: Strike, role: str, most_s: float) -> None:
        self._hit(strike)
        back_s = strike.rng.uniform(0.3, most_s)
        for node in self._cluster.of(role):
            self._later(0.0, lambda name=node.name: self._kill(name, back_s))

    def _deafen_router(self, strike: Strike) -> None:
        """Block messages from all four workers to the router for longer than it takes to declare
        one of them dead. The router must detect that it is isolated."""
        router = self._name(strike, "router")
        workers = [node.name for role in ("prefill", "decode") for node in self._cluster.of(role)]
        heals_s = strike.rng.uniform(2.0, 4.0)  # before keepalives detect broken connections
        for worker in workers:
            self._network.block(worker, router)
            self._later(heals_s, partial(self._network.heal, worker, router))
        self._later(SILENCE_S + 0.2, lambda: self._is_isolated(strike, router))

    def _is_isolated(self, strike: Strike, router: str) -> None:
        service = self._cluster.nodes[router].process.service
        if service is not None and service.core.fleet.isolated:
            self._hit(strike)

    # connections

    def _break(self, strike: Strike, kind: str) -> None:
        how = next(name for name in BREAKS if kind.startswith(name))
        one, other = (self._name(strike, r) for r in kind.removeprefix(how + " ").split("-"))
        rng, network = strike.rng, self._network
        connections = network.between(one, other) if one and other else []
        if not one or not other or (not connections and how in ("drop", "reset", "half-open")):
            return
        self._hit(strike)
        if how == "drop":
            for connection in connections:
                connection.drop()
        elif how == "reset":
            for connection in connections:
                connection.reset()
        elif how == "half-open":
            for connection in connections:
                connection.half(rng.choice((connection.up, connection.down)))
            self._later(16.0, lambda: None)  # until keepalives have detected it
        elif how == "delay":
            network.slow(one, other, rng.uniform(0.02, 0.8))
            self._later(rng.uniform(0.5, 3.0), lambda: network.slow(one, other, 0.0))
        else:
            src, dst = rng.choice(((one, other), (other, one)))
            network.block(src, dst)
            self._later(rng.uniform(0.2, 8.0), lambda: network.heal(src, dst))

    # messages

    def _message(self, strike: Strike, kind: str, message: Message | None) -> None:
        """Change the message that shows the phase, or else the next message of the attempt."""
        if message is None or strike.fault.phase == "queued":
            places = {self._name(strike, "prefill"), self._name(strike, "decode")} - {""}

            def wait(candidate: Message) -> bool:
                if candidate.src.name not in places:
                    return False
                if isinstance(candidate.body, bytes | wire.PrefillMessage | wire.DecodeMessage):
                    self._change(strike, kind, candidate)
                    return True
                return False

            self._armed.append(wait)
        else:
            self._change(strike, kind, message)

    def _change(self, strike: Strike, kind: str, message: Message) -> None:
        rng = strike.rng
        self._hit(strike)
        if kind == "duplicate message":
            message.again_s.append(rng.uniform(0.0, 0.02))
        elif kind == "reordered message":
            # Within one connection, only frames may be overtaken.
            if isinstance(message.body, bytes) and strike.fault.phase == "transferring":
                message.swap = True
            else:
                message.late_s = rng.uniform(0.005, 0.1)
        elif rng.random() < 0.5:
            message.late_s = rng.uniform(0.3, 3.0)
        else:
            message.again_s.append(rng.uniform(0.5, 6.0))
        self._later(6.0 if kind == "late message" else 0.1, lambda: None)

    # frames

    def _frame(self, strike: Strike, kind: str, message: Message | None) -> None:
        if kind == "replay of a frame":
            self._replay(strike)
        elif strike.fault.phase == "transferring" and message is not None:
            self._spoil(strike, kind, message)
        else:

            def wait(candidate: Message) -> bool:
                body = candidate.body
                # Frames of a chunk are sent while the next chunk is computed.
                frame = isinstance(body, bytes) and len(body) > FRAME_BYTES and body[3] == 1
                if frame and self.watch.frames[-1:][0][0] == strike.fault.request:
                    self._spoil(strike, kind, candidate)
                    return True
                return False

            self._armed.append(wait)

    def _spoil(self, strike: Strike, kind: str, message: Message) -> None:
        rng, body = strike.rng, bytearray(message.body)
        self._hit(strike)
        if kind == "bit flip":
            at = (
                rng.randrange(FRAME_BYTES, len(body))
                if rng.random() < 0.7
                else rng.randrange(8, len(body))
            )
            body[at] ^= 1 << rng.randrange(8)
            message.body = bytes(body)
        else:
            message.body = bytes(body[: rng.randrange(1, len(body))])
            for connection in self._network.between(message.src.name, message.dst.name):
                if not connection.pings:
                    message.sent.append(connection.drop)

    def _replay(self, strike: Strike) -> None:
        """Send an earlier frame again on a connection between the two workers."""
        prefill, decode = self._name(strike, "prefill"), self._name(strike, "decode")
        for connection in self._network.between(prefill, decode):
            frames = [record for _, record in self.watch.frames]
            if not connection.pings and frames:
                self._hit(strike)
                send = partial(connection.up.send, strike.rng.choice(frames))
                self._later(strike.rng.uniform(0, 0.01), send)

    # workers

    def _other_weights(self, strike: Strike, message: Message | None) -> None:
        assert message is not None
        self._hit(strike)
        if strike.fault.phase == "queued":
            message.body.start.kv_identity.digest = b"of other weights"
        else:

            def tamper(data: bytes) -> bytes:
                hello = messages.decode(data)
                assert isinstance(hello, messages.Hello)
                return messages.encode(replace(hello, identity=KvIdentity(b"of other weights")))

            self._network.tamper = tamper

    def _hog(self, strike: Strike, role: str) -> None:
        """Reserve every free or evictable block for a while."""
        part = self._runtime(strike, role)
        if part is None:
            return
        held: list[object] = []

        def take(engine: object) -> None:
            counts = engine.stats().blocks  # type: ignore[attr-defined]
            tokens = (counts.free + counts.cached) * engine.kv.spec.block_size  # type: ignore[attr-defined]
            ids = tuple(strike.rng.randrange(1, 64) for _ in range(max(1, tokens)))
            request = Request("hog", ids, SamplingParams(max_tokens=1), seed=0)
            taken = engine.reserve(request) if tokens else None  # type: ignore[attr-defined]
            if taken is not None:
                held.append(taken)
                self._hit(strike)

        def give_back() -> None:
            part.thread.post(lambda engine: [engine.release(r) for r in held])

        part.thread.post(take)
        self._later(strike.rng.uniform(0.3, 3.0), give_back)
