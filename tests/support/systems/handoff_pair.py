"""A Sender and a Receiver in one process, each with an engine on a separate thread."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import ask, fake_engine, run, tokens
from fakes.device import FakeDevice

from pdserve.engine.api import Finished, NewTokens, Request, Step, prefix_ids
from pdserve.engine.engine import Engine
from pdserve.engine.handoff.incoming import IncomingHandoff, Promises, Received
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import Phase, Ticket, slot_bytes
from pdserve.engine.handoff.receiver import Receiver
from pdserve.engine.handoff.recorder import EventLog, open_ring
from pdserve.engine.handoff.sender import PromptToSend, Sender
from pdserve.engine.kv import Mixing
from pdserve.engine.thread import EngineThread
from pdserve.engine.transport import TransportOptions, make_transports
from systems.eventually import LIMIT_S, wait_until

INF = float("inf")
DIRECT_TRANSPORTS = {"cuda_ipc"}  # whose payloads stay on a device, so cannot be encrypted


def claims_of(receiver: Receiver) -> list[IncomingHandoff]:
    """Return the attempts whose Claims wait for blocks, oldest attempt first."""
    return [one for one in receiver.live if one.state.phase is Phase.CLAIMED]


class Pair:
    """A pair of engines; `on_event` hooks see every step of a side, on its engine thread."""

    def __init__(
        self, prefill: Engine, decode: Engine, transport: str, folder: Path, **change: Any
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.prefill_incarnation, self.decode_incarnation = os.urandom(16), os.urandom(16)
        self.sent: dict[bytes, Sent] = {}
        self.received: dict[bytes, Received] = {}
        self.lost: dict[bytes, str] = {}
        self.verified: dict[bytes, list[tuple[int, int]]] = {}  # (tokens, before it)
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.finished: set[str] = set()
        self.prefill_hook: Callable[[Step], None] = lambda step: None
        self.prefill_thread = EngineThread(prefill, self._prefill_step)
        self.decode_thread = EngineThread(decode, self._decode_step)
        encrypted = change.get("encrypted", False)
        rings = str(change.get("rings", ""))
        self.rings = [
            open_ring(rings, "decode", self.decode_incarnation, 1),
            open_ring(rings, "prefill", self.prefill_incarnation, 1),
        ]
        options = TransportOptions(
            "127.0.0.1:0",
            str(folder),
            slot_bytes(prefill.kv.spec),
            change.get("device", FakeDevice) if transport == "cuda_ipc" else None,
            slot_bytes(prefill.kv.spec),
        )
        self.receiver = Receiver(
            decode,
            decode.kv,
            incarnation=self.decode_incarnation,
            identity=change.get("decode_identity", decode.kv_identity),
            on_received=self._note(self.received, lambda r: r.attempt, lambda r: r),
            on_lost=lambda attempt, reason: self._lost(attempt, reason),
            on_verified=self._verified,
            wake=self.decode_thread.wake,
            liveness=lambda: self.decode_thread.liveness,
            mixing=change.get("mixing", Mixing()),
            encrypted=change.get("decode_encrypted", encrypted),
            event_log=EventLog(self.rings[0]),
        )
        self.sender = Sender(
            prefill,
            prefill.kv,
            make_transports(transport, options),
            incarnation=self.prefill_incarnation,
            identity=prefill.kv_identity,
            on_ended=self._note(self.sent, lambda s: s.attempt, lambda s: s),
            wake=self.prefill_thread.wake,
            liveness=lambda: self.prefill_thread.liveness,
            passes_over=self.prefill_thread.passes_over,
            encrypted=encrypted,
            event_log=EventLog(self.rings[1]),
        )
        self.addresses = self.receiver.listen(make_transports(transport, options), True)
        self.prefill_thread.add_poll(self.sender.poll)
        self.decode_thread.add_poll(self.receiver.poll)
        for part in (self.prefill_thread, self.decode_thread, self.receiver, self.sender):
            part.start()

    def admit(self, request: Request, deadline: float = INF) -> Ticket | None:
        attempt = bytes.fromhex(request.key)
        return self.decode_thread.post(
            lambda _: self.receiver.admit(attempt, request, self.prefill_incarnation, deadline)
        ).result(LIMIT_S)

    def start(self, request: Request, ticket: Ticket, ids: Sequence[int] | None = None) -> None:
        chosen = tuple(ids if ids is not None else prefix_ids(request)[:-1])
        address = self.addresses.get("tcp", "")
        self.prefill_thread.post(
            lambda _: self.sender.start_sending(
                ticket, address, PromptToSend(chosen), INF, self.receiver.identity.digest
            )
        ).result(LIMIT_S)

    def hand_off(self, request: Request) -> bytes:
        """Admit and start a hand-off; return the attempt."""
        ticket = self.admit(request)
        assert ticket is not None, "busy"
        self.start(request, ticket)
        return ticket.attempt

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, (self.sent, self.received, self.lost, self.tokens), pause_s=0.002)

    def answer(self, request: Request) -> dict[int, list[int]]:
        """Return the generated ids of a request that ends, per choice."""
        self.wait(lambda: request.key in self.finished)
        return self.tokens[request.key]

    def at_decode(self, fn: Callable[[Receiver], Any]) -> Any:
        return self.decode_thread.post(lambda _: fn(self.receiver)).result(LIMIT_S)

    def at_prefill(self, fn: Callable[[Sender], Any]) -> Any:
        return self.prefill_thread.post(lambda _: fn(self.sender)).result(LIMIT_S)

    def assert_clean(self) -> None:
        """Check that no block is held, reserved or promised on either side: free + cached ==
        total.
        """
        threads = self.prefill_thread, self.decode_thread
        wait_until(lambda: all(map(self._clean, threads)), "nothing held", pause_s=0.002)
        assert self.at_decode(lambda r: (r.promises.blocks, r.num_live)) == (0, 0)
        assert self.at_prefill(lambda s: s.num_live) == 0

    def close(self) -> None:
        self.prefill_thread.close()
        self.decode_thread.close()
        self.sender.close()
        self.receiver.close()
        for ring in self.rings:
            if ring is not None:
                ring.close()

    def _clean(self, thread: EngineThread) -> bool:
        counts = thread.post(lambda engine: engine.stats().blocks).result(LIMIT_S)
        return bool(counts.free + counts.cached == counts.total)

    def _prefill_step(self, step: Step) -> None:
        self.sender.on_step(step)
        self.prefill_hook(step)

    def _decode_step(self, step: Step) -> None:
        for event in step.events:
            if isinstance(event, NewTokens):
                choices = self.tokens.setdefault(event.key, {})
                choices.setdefault(event.choice, []).extend(event.ids)
            elif isinstance(event, Finished):
                self.finished.add(event.key)

    def _lost(self, attempt: bytes, reason: str) -> None:
        assert attempt not in self.lost
        self.lost[attempt] = reason

    def _verified(self, attempt: bytes, tokens: int, before: int) -> None:
        self.verified.setdefault(attempt, []).append((tokens, before))

    def _note(
        self, into: dict[bytes, Any], key: Callable[[Any], bytes], value: Callable[[Any], Any]
    ) -> Callable[[Any], None]:
        def note(entry: Any) -> None:
            assert key(entry) not in into, "the end is reported twice"
            into[key(entry)] = value(entry)

        return note


def fresh(request: Request) -> Request:
    """Return the same request as another attempt."""
    return replace(request, key=os.urandom(16).hex())


MakePair = Callable[..., Pair]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 13 + i * i) % 60 for i in range(length)]


def request(length: int, seed: int = 0, **params: Any) -> Request:
    return fresh(ask("", prompt(length, seed), **params))


def local(body: Request, **engine: Any) -> dict[int, list[int]]:
    """Return the answer of a single engine."""
    found = tokens(run(fake_engine(**engine), body))
    return {choice: ids for (_, choice), ids in found.items()}


def promise_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise any prompt, as if there had been room when it was admitted."""

    def offer(promises: Promises, blocks: int, available: int, running: int) -> bool:
        promises.blocks += blocks
        return True

    monkeypatch.setattr(Promises, "offer", offer)
