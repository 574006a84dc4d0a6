"""One end of a transfer: a process with a pool, and the real Sender or Receiver over it.

    python -m kv_transfer.end prefill|decode TRANSPORT FOLDER BIND [untagged|sealed]

Nothing is computed: an engine of a few lines reports whole prompts as computed. A command is one
JSON object per line on stdin, its answer one on stdout:

decode:  {"do": "admit", "prefill": incarnation} -> the ticket; {"do": "digest"} -> of the last
         prompt's blocks; {"do": "clear"}; {"do": "memcpy"} -> bytes a second;
         {"do": "bare", "rounds": n}: receive from a bare socket
prefill: {"do": "send", "ticket": ..., "address": ...} -> seconds from the last chunk's end to
         decode's Complete; {"do": "digest"}; {"do": "bare", "address": ..., "rounds": n}

`untagged` omits only the payload's tags on this side: the copies and the tags of the header and
the messages stay. Only this benchmark can do that. `sealed` encrypts payloads
as `--encrypt-kv` does.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from systems.eventually import wait_until

from pdserve.engine.api import PrefillComputed, Request, SamplingParams, Scheduled, Step
from pdserve.engine.handoff.incoming import Received
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import Domain, TagKey, Ticket, keys, slot_bytes
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.sender import PromptToSend, Sender
from pdserve.engine.kv import KvIdentity, KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.thread import EngineThread
from pdserve.engine.transport import TransportOptions, make_transports

NUM_TOKENS = 2_000
SPEC = KvSpec(  # of the shipped model, SmolLM2-135M, as the native kernels store it: 46 MB
    32, (LayerGroup(tuple(range(30)), "full", 0, 3, 64, "bfloat16", 0, 3, keys_by_dim=True),)
)
NUM_BLOCKS = -(-NUM_TOKENS // SPEC.block_size)
NUM_BYTES = SPEC.pool_bytes([NUM_BLOCKS])
BLOCKS = list(range(1, NUM_BLOCKS + 1))
IDENTITY = KvIdentity(b"benchmark")
PIECE = 1 << 20  # of a bare socket's send and recv
SOCKET_BUFFER_BYTES = 4 << 20  # as tcp.py sets it
PATIENCE_S = 60.0


class Untagged(TagKey):
    """A key whose payload tags are zeros that are neither computed nor compared."""

    def tag(self, domain: Domain, sequence: int, *parts: bytes | memoryview) -> bytes:
        return bytes(16) if domain is Domain.PAYLOAD else super().tag(domain, sequence, *parts)


@dataclass
class Reservation:
    num_tokens: int
    blocks: list[list[int]]
    first_block: list[int]
    cached_tokens: int = 0


class Idle:
    """An engine that computes nothing and owns one prompt's blocks."""

    has_work = False

    def __init__(self) -> None:
        self.kv = KvCache(SPEC, [NUM_BLOCKS])
        blocks = SimpleNamespace(total=NUM_BLOCKS, free=NUM_BLOCKS, cached=0)
        self._stats = SimpleNamespace(blocks=blocks, parked_blocks=0, running=0)

    def wake_with(self, wake: Any) -> None: ...
    def schedule(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def release_held(self, key: str) -> None: ...
    def commit(self, reservation: Reservation) -> None: ...
    def release(self, reservation: Reservation) -> None: ...
    def park(self, key: str) -> bool:
        return True

    def abort(self, key: str, choices: Any = ()) -> bool:
        return True

    def stats(self) -> Any:
        return self._stats

    def held_blocks(self, key: str) -> list[list[int]]:
        return [BLOCKS]

    def verified(self, reservation: Reservation, num_tokens: int) -> int:
        return num_tokens

    def reserve(self, request: Request, sender: bytes = b"") -> Reservation:
        return Reservation(NUM_TOKENS, [BLOCKS], [0])

    def fill(self, seed: int) -> None:
        words = self.kv.data[0].view(np.int64)
        words[:] = np.random.default_rng(seed).integers(-(1 << 63), 1 << 63, words.shape, np.int64)

    def used(self) -> "np.ndarray[Any, Any]":
        """[layers, bytes] of the blocks of one prompt, in memory order."""
        data = self.kv.data[0]
        return data.reshape(data.shape[0], NUM_BLOCKS + 1, -1).view(np.uint8)[:, 1:]

    def digest(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.used()).tobytes()).hexdigest()


def options(folder: str, bind: str) -> TransportOptions:
    return TransportOptions(f"{bind}:0", folder, slot_bytes(SPEC))


def buffered(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, name, SOCKET_BUFFER_BYTES)
    return sock


class Decode:
    """The receiving end."""

    def __init__(self, transport: str, folder: str, bind: str, sealed: bool) -> None:
        self.engine = Idle()
        self.engine.fill(1)  # touches its pages
        self.incarnation = os.urandom(16)
        self.bind = bind
        self.source: Any = None
        self.done = threading.Event()
        self.lost: list[str] = []
        self.thread = EngineThread(self.engine, lambda step: None)  # type: ignore[arg-type]
        self.receiver = Receiver(
            self.engine,
            self.engine.kv,
            incarnation=self.incarnation,
            identity=IDENTITY,
            on_received=self._received,
            on_lost=lambda attempt, reason: self.lost.append(reason),
            wake=self.thread.wake,
            liveness=lambda: self.thread.liveness,
            encrypted=sealed,
        )
        found = self.receiver.listen(make_transports(transport, options(folder, bind)), True)
        self.address = found.get("tcp", "")
        self.listener = socket.create_server((bind, 0))
        self.thread.add_poll(self.receiver.poll)
        self.thread.start()
        self.receiver.start()

    def hello(self) -> dict[str, Any]:
        port = self.listener.getsockname()[1]
        bare = f"{self.bind}:{port}"
        return {"incarnation": self.incarnation.hex(), "address": self.address, "bare": bare}

    def _received(self, received: Received) -> None:
        self.done.set()

    def admit(self, body: dict[str, Any]) -> dict[str, Any]:
        attempt = os.urandom(16)
        request = Request(
            attempt.hex(), tuple(range(NUM_TOKENS + 1)), SamplingParams(max_tokens=1), seed=0
        )
        prefill = bytes.fromhex(body["prefill"])
        ticket = self.thread.post(
            lambda _: self.receiver.admit(attempt, request, prefill, float("inf"))
        ).result(PATIENCE_S)
        assert ticket is not None, self.lost
        return {"id": ticket.id.hex(), "secret": ticket.secret.hex(), "attempt": attempt.hex()}

    def digest(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"digest": self.engine.digest(), "lost": self.lost}

    def clear(self, request: dict[str, Any]) -> dict[str, Any]:
        self.engine.kv.data[0][:] = 0
        return {}

    def memcpy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Copy one prompt's keys and values from memory of the same size into the pool."""
        target = self.engine.kv.data[0].view(np.uint8).reshape(-1)[:NUM_BYTES]
        if self.source is None:
            self.source = np.full(NUM_BYTES, 7, np.uint8)
        started = time.perf_counter()
        np.copyto(target, self.source)
        return {"rate": NUM_BYTES / (time.perf_counter() - started)}

    def bare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Fill the pool's memory from a socket, `rounds` times; the sender sees the end of each by
        one byte back."""
        sock = buffered(self.listener.accept()[0])
        view = memoryview(self.engine.kv.data[0].view(np.uint8).reshape(-1))
        with sock:
            for _ in range(request["rounds"]):
                at = 0
                while at < NUM_BYTES:
                    at += sock.recv_into(view[at : min(at + PIECE, NUM_BYTES)])
                sock.send(b"x")
        return {}


class Prefill:
    """The sending end."""

    def __init__(self, transport: str, folder: str, bind: str, sealed: bool) -> None:
        self.engine = Idle()
        self.engine.fill(2)
        self.incarnation = os.urandom(16)
        self.ended: dict[bytes, Sent] = {}
        self.changed = threading.Condition()
        self.thread = EngineThread(self.engine, lambda step: None)  # type: ignore[arg-type]
        self.sender = Sender(
            self.engine,
            self.engine.kv,
            make_transports(transport, options(folder, bind)),
            incarnation=self.incarnation,
            identity=IDENTITY,
            on_ended=self._ended,
            wake=self.thread.wake,
            liveness=lambda: self.thread.liveness,
            passes_over=self.thread.passes_over,
            encrypted=sealed,
        )
        self.thread.add_poll(self.sender.poll)
        self.thread.start()
        self.sender.start()

    def hello(self) -> dict[str, Any]:
        return {"incarnation": self.incarnation.hex()}

    def _ended(self, sent: Sent) -> None:
        with self.changed:
            self.ended[sent.attempt] = sent
            self.changed.notify_all()

    def _tell(self, *events: Any) -> None:
        step = Step(0, events, 0.0)
        self.thread.post(lambda _: self.sender.on_step(step)).result(PATIENCE_S)

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        ticket = Ticket(
            *(bytes.fromhex(request[name]) for name in ("id", "secret", "attempt")),
            self.incarnation,
            bytes.fromhex(request["decode"]),
        )
        self.thread.post(
            lambda _: self.sender.start_sending(
                ticket,
                request["address"],
                PromptToSend(tuple(range(NUM_TOKENS))),
                float("inf"),
                IDENTITY.digest,
            )
        ).result(PATIENCE_S)
        outgoing = self.sender.attempt(ticket.attempt)
        self._tell(Scheduled(outgoing.key, 0))
        wait_until(
            lambda: outgoing.next_blocks or outgoing.state.final, "a grant", PATIENCE_S, 0.001
        )
        cpu = time.process_time()
        self._tell(PrefillComputed(outgoing.key, NUM_TOKENS, True))
        with self.changed:
            assert self.changed.wait_for(lambda: ticket.attempt in self.ended, PATIENCE_S)
        sent = self.ended.pop(ticket.attempt)
        seconds = sent.times.completed - sent.times.computed
        return {
            "reason": sent.reason,
            "rate": NUM_BYTES / seconds,
            "seconds": seconds,
            "cpu_s": time.process_time() - cpu,
            "resent": self.sender.counters["resent"],
        }

    def digest(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"digest": self.engine.digest()}

    def bare(self, request: dict[str, Any]) -> dict[str, Any]:
        host, port = request["address"].rsplit(":", 1)
        view = memoryview(self.engine.kv.data[0].view(np.uint8).reshape(-1))
        rates = []
        with buffered(socket.create_connection((host, int(port)))) as sock:
            for _ in range(request["rounds"]):
                started, at = time.perf_counter(), 0
                while at < NUM_BYTES:
                    at += sock.send(view[at : min(at + PIECE, NUM_BYTES)])
                assert sock.recv(1) == b"x"
                rates.append(NUM_BYTES / (time.perf_counter() - started))
        return {"rates": rates}


def main() -> None:
    role, transport, folder, bind = sys.argv[1:5]
    if "untagged" in sys.argv[5:]:
        keys.TagKey = Untagged  # type: ignore[misc]
    sealed = "sealed" in sys.argv[5:]
    end = (Decode if role == "decode" else Prefill)(transport, folder, bind, sealed)
    print(json.dumps(end.hello()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(end, request["do"])(request)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
