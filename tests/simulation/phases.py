"""The phase of each request, derived from the messages and computations of the processes without
querying the services.

admitted      decode has sent Admitted
queued        PrefillStart has arrived at the prefill worker; its engine has not picked it
claimed       prefill has sent Claim
computing     the engine has planned a chunk of the prompt (k-th: index k)
transferring  prefill has sent a frame (i-th: index i)
followed      decode has sent another request a notice that it waits for this one's KV
complete      decode has sent Complete: every block is verified, no row has run yet
decoding      decode has sent the token at position j of a choice (index j)
last          decode has sent a choice's last token, or Finished
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from pdserve.engine.handoff.protocol import FRAME_TYPE, PREFIX_BYTES, FrameHeader, Prefix, messages
from pdserve.engine.handoff.protocol.frames import FRAME_BYTES
from pdserve.protos import fleet_pb2, router_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.services.common.rpc import RowReader
from simulation.clock import Process
from simulation.network import Message

PHASES = (
    "admitted", "queued", "claimed", "computing", "transferring", "followed", "complete",
    "decoding", "last",
)  # fmt: skip
# PrefillStart is about to be sent. This is no phase.
REQUESTED = "requested"
# Steps of a migration to another decode worker. The source then sends in prefill's place: it has
# sent Held, the router is about to send Move, and the source has sent Moved. In between, the
# request is claimed, transferring and complete as in any hand-off. Arguments: request, phase,
# index, and the message that shows it, or None.
Tell = Callable[[str, str, int, Message | None], None]


class PhaseWatch:
    """Watches the network and the engines; calls `tell` at every step of a request."""

    def __init__(self, tell: Tell) -> None:
        self.current: dict[str, str] = {}
        self.failed_in: dict[str, str] = {}  # the phase of a request's first failure
        self.places: dict[str, dict[str, str]] = {}  # request -> role -> process name
        self.frames: list[tuple[str, bytes]] = []  # (request, record and payload), as sent
        self.seen: Counter[str] = Counter()
        # (request, position) -> how often its KV was computed, at prefill or decode
        self.computed: Counter[tuple[str, int]] = Counter()
        self.placed_again: Counter[str] = Counter()  # by request
        self._tell = tell
        self._requests: dict[bytes, str] = {}  # by attempt
        self._tickets: dict[bytes, bytes] = {}  # ticket -> attempt
        self._names: dict[bytes, str] = {}  # incarnation -> worker
        self._counts: Counter[tuple[bytes, str]] = Counter()
        self._prompts: dict[str, list[int]] = {}
        self._rows: dict[tuple[str, str], RowReader] = {}  # by decode and router

    def request_of(self, attempt: bytes) -> str:
        return self._requests.get(attempt, "")

    def attempts_of(self, request: str) -> list[bytes]:
        return [attempt for attempt, name in self._requests.items() if name == request]

    def on_message(self, message: Message) -> None:
        body = message.body
        if isinstance(body, bytes):
            self._on_records(message, body)
        elif isinstance(body, wire.DecodeCommand):
            if body.HasField("admit"):
                self._on_admit(message, body.admit)
            elif body.HasField("move"):
                self._step(body.move.attempt, "sending", message)
        elif isinstance(body, wire.PrefillCommand):
            if body.HasField("start"):
                attempt = body.start.attempt
                self.places[self._requests[attempt]]["prefill"] = message.dst.name
                self._step(attempt, REQUESTED, message)
                message.arrived.append(lambda: self._queued(attempt, message))
        elif isinstance(body, wire.DecodeMessage):
            for event in body.events:
                self._on_decode(message, event)
        elif isinstance(body, router_pb2.RouterMessage):
            for event in body.events:
                if event.HasField("failed"):
                    self._on_failed(event.failed.request)
        elif isinstance(body, router_pb2.GatewayMessage):
            if body.HasField("start"):
                place = self.places.setdefault(body.start.request, {})
                place["gateway"], place["router"] = message.src.name, message.dst.name
        elif isinstance(body, fleet_pb2.WorkerReport) and body.HasField("hello"):
            self._names[body.hello.incarnation] = message.src.name

    def _on_admit(self, message: Message, admit: wire.Admit) -> None:
        self._requests[admit.attempt] = admit.start.request
        self._prompts[admit.start.request] = list(admit.start.prompt_ids)
        place = self.places.setdefault(admit.start.request, {})
        place["router"], place["decode"] = message.src.name, message.dst.name
        place.pop("prefill", None)
        if admit.prefill_incarnation:
            place["prefill"] = self._names[admit.prefill_incarnation]

    def _on_decode(self, message: Message, event: wire.DecodeEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "admitted":
            attempt = event.admitted.attempt
            self._tickets[event.admitted.ticket.id] = attempt
            self._step(attempt, "admitted", message)
            if event.admitted.follows:
                self._step(self._leader(attempt), "followed", message)
        elif kind == "place_again":
            self.placed_again[self._requests[event.place_again.attempt]] += 1
        elif kind == "tokens":
            tokens = event.tokens
            self._step(tokens.attempt, "decoding", message)
            if tokens.finish:
                self._step(tokens.attempt, "last", message)
        elif kind == "rows":
            session = self._rows.setdefault((message.src.name, message.dst.name), RowReader())
            for choice, _, _ in session.read(event.rows):
                self._step(choice.attempt, "decoding", message)
        elif kind == "finished":
            self._step(event.finished.attempt, "last", message)
        elif kind in ("held", "moved"):
            self._step(getattr(event, kind).attempt, kind, message)
        elif kind == "failed":
            self._on_failed(event.failed.request)

    def _leader(self, follower: bytes) -> bytes:
        """Return the newest attempt of the oldest request with the longest prefix in common with a
        follower."""
        name = self._requests[follower]
        others = [other for other in self._prompts if other != name]
        best = max(others, key=lambda other: _common(self._prompts[other], self._prompts[name]))
        return self.attempts_of(best)[-1]

    def _on_failed(self, request: str) -> None:
        self.failed_in.setdefault(request, self.current.get(request, ""))

    def _queued(self, attempt: bytes, message: Message) -> None:
        if not self._counts[attempt, "computing"]:
            self._step(attempt, "queued", message)

    def _on_records(self, message: Message, data: bytes) -> None:
        at = 0
        while at + PREFIX_BYTES <= len(data):
            prefix = Prefix.unpack(data[at : at + PREFIX_BYTES])
            end = at + PREFIX_BYTES + prefix.length
            if prefix.type == FRAME_TYPE:
                header, _, _ = FrameHeader.unpack(data[at : at + FRAME_BYTES])
                end += header.payload_bytes
                attempt = self._tickets.get(header.ticket, b"")
                self.frames.append((self.request_of(attempt), data[at:end]))
                self._step(attempt, "transferring", message)
            else:
                self._on_control(message, messages.decode(data[at:end]))
            at = end

    def _on_control(self, message: Message, record: Any) -> None:
        if isinstance(record, messages.Signed):
            attempt = self._tickets.get(record.ticket, b"")
            if isinstance(record.body, messages.Claim):
                self._step(attempt, "claimed", message)
            elif isinstance(record.body, messages.Complete):
                self._step(attempt, "complete", message)

    def on_plan(self, process: Process, plan: Any) -> None:
        for row in plan.rows:
            try:
                attempt = bytes.fromhex(row.sequence.job.key)
            except ValueError:
                continue  # sent by a fault
            request = self.request_of(attempt)
            self.computed.update((request, position) for position in range(row.start, row.end))
            if row.num_tokens > 1 or row.sequence.job.request.prefill_only:
                self._step(attempt, "computing", None)

    def _step(self, attempt: bytes, phase: str, message: Message | None) -> None:
        request = self._requests.get(attempt)
        if request is None:
            return
        index = self._counts[attempt, phase]
        self._counts[attempt, phase] += 1
        self.seen[phase] += 1
        if phase in PHASES:
            self.current[request] = phase
        self._tell(request, phase, index, message)


def _common(one: list[int], other: list[int]) -> int:
    """Return the number of equal leading tokens."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
