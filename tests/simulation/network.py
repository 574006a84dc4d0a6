"""In-memory connections between processes: ordered, delayed and breakable.

Faults that TCP excludes do not occur: within a connection nothing is overtaken, and nothing is lost
unless the connection is lost. A partition delays bytes, as retransmission would; a half-open
connection loses one direction until a keepalive ends it.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.clock import Process, State, World

KEEPALIVE_S = (5.0, 15.0)  # services/common/rpc/channel.py: a ping each 10 s, answered within 5 s
POLL_S = 0.05  # between attempts to reach a silent peer
END = object()


@dataclass(slots=True)
class Message:
    """A message about to be sent. Watchers may change it."""

    src: Process
    dst: Process
    body: Any  # a proto, or the bytes of a data connection
    late_s: float = 0.0  # delays the connection from here on
    again_s: list[float] = field(default_factory=list)  # extra copies, delayed by these times
    swap: bool = False  # deliver it after the next message
    sent: list[Callable[[], None]] = field(default_factory=list)  # called after sending
    arrived: list[Callable[[], None]] = field(default_factory=list)  # called on arrival


@dataclass(frozen=True, slots=True)
class _Told:
    item: Any
    acts: list[Callable[[], None]]


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: "Network", src: Process, dst: Process) -> None:
        self.network = network
        self.src, self.dst = src, dst
        self.take: Callable[[Any], None] = lambda item: None
        self.swallows = False  # half-open
        self._last = 0.0
        self._held: deque[Any] = deque()
        self._swapped: list[Any] = []

    def transmit(self, body: Any, pack: Callable[[Any], Any]) -> None:
        """Show the message to the watchers and send the result of their changes."""
        message = Message(self.src, self.dst, body)
        self.network.tell(message)
        if not self.src.alive:  # a watcher has killed the process
            return
        item = pack(message.body)
        if message.arrived:
            item = _Told(item, message.arrived)
        if message.swap and not self._swapped:
            self._swapped.append(item)
        else:
            self.send(item, message.late_s)
            while self._swapped:
                self.send(self._swapped.pop())
        for act in message.sent:
            act()
        for delay_s in message.again_s:
            self.network.world.after(delay_s, self.dst, self._arrive, item)

    def send(self, item: Any, late_s: float = 0.0, dead: bool = False) -> None:
        network = self.network
        if network.closed or self.swallows or not (self.src.alive or dead):
            return
        when = network.world.now + network.delay_s(self.src, self.dst) + late_s
        self._last = max(self._last, when)
        network.world.at(self._last, self.dst, self._arrive, item)

    def _arrive(self, item: Any) -> None:
        if self.swallows:
            return
        if self._held or self.network.blocked(self.src, self.dst):
            self._held.append(item)
            self.network.holding[self] = None
        else:
            self._deliver(item)

    def _deliver(self, item: Any) -> None:
        if isinstance(item, _Told):
            for act in item.acts:
                act()
            item = item.item
        self.take(item)

    def healed(self) -> None:
        """Release messages that the partition held back; they come before any that are in
        transit."""
        network = self.network
        network.world.after(network.delay_s(self.src, self.dst), self.dst, self._release)

    def _release(self) -> None:
        if self.swallows:
            self._held.clear()
        if self._held and not self.network.blocked(self.src, self.dst):
            item = self._held.popleft()
            self.network.world.after(0.0, self.dst, self._release)
            self._deliver(item)
        elif not self._held:
            self.network.holding.pop(self, None)


class Connection:
    """Two pipes, and a callback per end for the connection's end: `lost(reason)`, at most once
    each."""

    def __init__(self, network: "Network", client: Process, server: Process, pings: bool) -> None:
        self.network = network
        self.client, self.server = client, server
        self.up = Pipe(network, client, server)
        self.down = Pipe(network, server, client)
        self.lost: dict[Process, Callable[[str], None]] = {}
        self.pings = pings
        network.connections.append(self)

    @property
    def open(self) -> bool:
        return self in self.network.connections

    def close(self, by: Process) -> None:
        """Close one end; the other end is notified after the messages that were sent."""
        other = self.server if by is self.client else self.client
        pipe = self.up if by is self.client else self.down
        if self.open:
            self.network.connections.remove(self)
            pipe.send((END, self, other), dead=True)

    def ended(self, at: Process, reason: str) -> None:
        """Notify an end that the connection is over."""
        if self.open:
            self.network.connections.remove(self)
        act = self.lost.pop(at, None)
        if act is not None:
            act(reason)

    def reset(self, reason: str = "connection reset") -> None:
        """Notify both ends; messages in transit are lost."""
        self.up.swallows = self.down.swallows = True
        for process in (self.client, self.server):
            self.network.world.after(0.0005, process, self.ended, process, reason)

    def drop(self) -> None:
        """Close from between the ends: both read an end after the messages that were sent."""
        if self.open:
            self.network.connections.remove(self)
            for pipe, process in ((self.up, self.server), (self.down, self.client)):
                pipe.send((END, self, process), dead=True)

    def half(self, pipe: Pipe) -> None:
        """Lose everything that is sent in one direction from here on."""
        pipe.swallows = True
        self.watch()

    def watch(self) -> None:
        """Schedule keepalives, which detect a silent peer some time after it fell silent."""
        if self.pings:
            network = self.network
            delay_s = network.world.rng.uniform(*KEEPALIVE_S)
            for process in (self.client, self.server):
                network.world.after(delay_s, process, self._keepalive, process)

    def _keepalive(self, process: Process) -> None:
        other = self.server if process is self.client else self.client
        network = self.network
        silent = (
            self.up.swallows
            or self.down.swallows
            or other.state is State.STOPPED
            or network.blocked(process, other)
            or network.blocked(other, process)
        )
        if silent and process in self.lost:
            (self.up if process is self.client else self.down).send((END, self, other), dead=True)
            self.ended(process, "keepalive timeout")


class Network:
    """Registry of listeners, reachability and watchers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.closed = False
        self.connections: list[Connection] = []
        self.holding: dict[Pipe, None] = {}  # held by partitions, also for closed connections
        self.listeners: dict[str, tuple[Process, Any]] = {}  # by address
        self.watchers: list[Callable[[Message], None]] = []
        self.tamper: Callable[[bytes], bytes] | None = None  # applied to the next introduction
        self._blocked: Counter[tuple[str, str]] = Counter()
        self._slow: dict[tuple[str, str], float] = {}

    def tell(self, message: Message) -> None:
        if not self.closed:
            for watch in self.watchers:
                watch(message)

    def delay_s(self, src: Process, dst: Process) -> float:
        rng = self.world.rng
        base = rng.uniform(0.0001, 0.001) * (10 if rng.random() < 0.02 else 1)
        return base + self._slow.get((src.name, dst.name), 0.0)

    def add(self, process: Process) -> None:
        """Register a process; its connections end with it."""
        process.on_death.append(lambda: self._died(process))

    # listeners

    def listen(self, address: str, process: Process, listener: Any) -> None:
        self.listeners[address] = (process, listener)

    def unlisten(self, process: Process) -> None:
        self.listeners = {a: e for a, e in self.listeners.items() if e[0] is not process}

    def _died(self, process: Process) -> None:
        """Close the connections of a dead process, as its kernel would."""
        self.unlisten(process)
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                connection.close(process)

    def find(self, src: Process, address: str) -> tuple[Process, Any] | None:
        """Return the listener at an address, or None if it refuses. Raises TimeoutError if no
        answer comes back."""
        name = address.partition(":")[0]
        if self._blocked[src.name, name] > 0 or self._blocked[name, src.name] > 0:
            raise TimeoutError(address)
        return self.listeners.get(address)

    async def dial(self, src: Process, address: str, kernel: bool = False) -> tuple[Process, Any]:
        """Return the listener once it is reached; a stopped process is reached only if its kernel's
        answer is enough. Waits while no answer comes back. Raises ConnectionRefusedError."""
        while True:
            await asyncio.sleep(2 * self.delay_s(src, src))
            try:
                found = self.find(src, address)
            except TimeoutError:
                await asyncio.sleep(POLL_S)
                continue
            if found is None:
                raise ConnectionRefusedError(f"{address} refused")
            if kernel or found[0].state is State.RUNNING:
                return found
            await asyncio.sleep(POLL_S)

    def connect(self, client: Process, server: Process, pings: bool) -> Connection:
        return Connection(self, client, server, pings)

    # faults

    def between(self, one: str, other: str) -> list[Connection]:
        """Return the open connections between two processes, by name."""
        return [c for c in self.connections if {c.client.name, c.server.name} == {one, other}]

    def blocked(self, src: Process, dst: Process) -> bool:
        return bool(self._blocked) and self._blocked[src.name, dst.name] > 0

    def block(self, src: str, dst: str) -> None:
        """Start a one-way partition: bytes from src to dst wait."""
        self._blocked[src, dst] += 1
        for connection in self.between(src, dst):
            connection.watch()

    def heal(self, src: str, dst: str) -> None:
        self._blocked[src, dst] -= 1
        for pipe in self.holding:
            if (pipe.src.name, pipe.dst.name) == (src, dst):
                pipe.healed()

    def slow(self, one: str, other: str, delay_s: float) -> None:
        """Delay every message between two processes by this time."""
        self._slow[one, other] = self._slow[other, one] = delay_s

    def stopped(self, process: Process) -> None:
        """Let keepalives of its peers detect a stopped process."""
        for connection in self.connections:
            if process in (connection.client, connection.server):
                connection.watch()
