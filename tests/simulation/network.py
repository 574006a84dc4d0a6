"""Connections between processes, in memory: in order within one, with a delay, and breakable.

What TCP cannot do does not happen here: nothing overtakes within a connection and nothing is lost
without the connection. A partition holds bytes back, as retransmission would; a half-open
connection swallows one direction until a keepalive ends it.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.clock import Process, State, World

KEEPALIVE_S = (5.0, 15.0)  # services/host/rpc/channel.py: pings each 10 s, 5 s for an answer
POLL_S = 0.05  # between two tries to reach a peer that does not answer
END = object()


@dataclass(slots=True)
class Message:
    """What is about to be sent. Watchers may change it."""

    src: Process
    dst: Process
    body: Any  # a proto, or the bytes of a data connection
    late_s: float = 0.0  # the connection stalls from here on
    again_s: list[float] = field(default_factory=list)  # copies, that much later
    swap: bool = False  # deliver it behind the one after it
    sent: list[Callable[[], None]] = field(default_factory=list)  # called once it is
    arrived: list[Callable[[], None]] = field(default_factory=list)  # called then


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
        """Shows the message to the watchers and sends what they leave of it."""
        message = Message(self.src, self.dst, body)
        self.network.tell(message)
        if not self.src.alive:  # a watcher has killed it
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
        """What was held back comes first, whatever is on its way by now."""
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
    """Two pipes, and the two ends' callbacks for its end: `lost(reason)`, at most once each."""

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
        """One end closes; the other hears of it after what was sent."""
        other = self.server if by is self.client else self.client
        pipe = self.up if by is self.client else self.down
        if self.open:
            self.network.connections.remove(self)
            pipe.send((END, self, other), dead=True)

    def ended(self, at: Process, reason: str) -> None:
        """An end hears that it is over."""
        if self.open:
            self.network.connections.remove(self)
        act = self.lost.pop(at, None)
        if act is not None:
            act(reason)

    def reset(self, reason: str = "connection reset") -> None:
        """Both ends hear of it, whatever is on the way is lost."""
        self.up.swallows = self.down.swallows = True
        for process in (self.client, self.server):
            self.network.world.after(0.0005, process, self.ended, process, reason)

    def drop(self) -> None:
        """Closed by something between the two: both read an end after what was sent."""
        if self.open:
            self.network.connections.remove(self)
            for pipe, process in ((self.up, self.server), (self.down, self.client)):
                pipe.send((END, self, process), dead=True)

    def half(self, pipe: Pipe) -> None:
        """What is sent in one direction is lost from here on."""
        pipe.swallows = True
        self.watch()

    def watch(self) -> None:
        """The keepalive finds a silent peer some time after it fell silent."""
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
    """Who listens where, who reaches whom, and who watches."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.closed = False
        self.connections: list[Connection] = []
        self.holding: dict[Pipe, None] = {}  # what a partition holds back, of closed ones too
        self.listeners: dict[str, tuple[Process, Any]] = {}  # by address
        self.watchers: list[Callable[[Message], None]] = []
        self.tamper: Callable[[bytes], bytes] | None = None  # of the next introduction
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
        """Its connections end with it."""
        process.on_death.append(lambda: self._died(process))

    # who listens

    def listen(self, address: str, process: Process, listener: Any) -> None:
        self.listeners[address] = (process, listener)

    def unlisten(self, process: Process) -> None:
        self.listeners = {a: e for a, e in self.listeners.items() if e[0] is not process}

    def _died(self, process: Process) -> None:
        """The kernel closes what a dead process had open."""
        self.unlisten(process)
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                connection.close(process)

    def find(self, src: Process, address: str) -> tuple[Process, Any] | None:
        """Who listens there; None: refused. Raises TimeoutError if nothing comes back."""
        name = address.partition(":")[0]
        if self._blocked[src.name, name] > 0 or self._blocked[name, src.name] > 0:
            raise TimeoutError(address)
        return self.listeners.get(address)

    async def dial(self, src: Process, address: str, kernel: bool = False) -> tuple[Process, Any]:
        """Reaches a listener; a stopped one only if its kernel's answer is enough. Waits for as
        long as nothing comes back. Raises ConnectionRefusedError."""
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
        """Open connections between two processes by name."""
        return [c for c in self.connections if {c.client.name, c.server.name} == {one, other}]

    def blocked(self, src: Process, dst: Process) -> bool:
        return bool(self._blocked) and self._blocked[src.name, dst.name] > 0

    def block(self, src: str, dst: str) -> None:
        """A one-way partition: bytes from src to dst wait."""
        self._blocked[src, dst] += 1
        for connection in self.between(src, dst):
            connection.watch()

    def heal(self, src: str, dst: str) -> None:
        self._blocked[src, dst] -= 1
        for pipe in self.holding:
            if (pipe.src.name, pipe.dst.name) == (src, dst):
                pipe.healed()

    def slow(self, one: str, other: str, delay_s: float) -> None:
        """Every message between the two takes this much longer."""
        self._slow[one, other] = self._slow[other, one] = delay_s

    def stopped(self, process: Process) -> None:
        """SIGSTOP: keepalives of its peers may find it."""
        for connection in self.connections:
            if process in (connection.client, connection.server):
                connection.watch()
