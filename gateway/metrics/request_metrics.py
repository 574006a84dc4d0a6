"""Measures each request phase by phase for metrics, token usage and its log line, and keeps the
open and the recently ended requests of this gateway.

Invariant: the durations of the phases before the first token sum to the time to first token. The
gateway measures "receive" and "prepare"; the router and the decode worker report the next ones
(protos/common.proto). "return" is the remainder: the communication between the processes in both
directions.

Invariant: `RequestMetrics.close` is called once per request and counts it once, whether it ends
with an answer or an error. Only the Service adds requests to the RequestLog and moves them to the
ended ones; all others get snapshots.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from pdserve.gateway.caller import Caller
from pdserve.gateway.metrics.metrics import GatewayMetrics, Observer
from pdserve.protos.common_pb2 import CANCELLED, INTERNAL, ErrorCode, Finished, Phases
from pdserve.protos.router_pb2 import Placed
from pdserve.services.common.errors import HTTP_STATUS, ServiceError
from pdserve.services.common.tracing import NO_SPAN, TraceSpan

log = logging.getLogger("pdserve.gateway.request")
MAX_ATTEMPTS = 16  # recorded per request
MAX_LINE = 200  # characters of a request's log line
MIN_MODEL = 8  # of a model's name in the line, which is cut before the figures are
MIN_KEY = 8  # of a key's name
MIN_MESSAGE = 40  # of an error's message, for which the name is cut


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """The name and duration of one phase of a request, in seconds; `start_s` counts from the
    arrival of the HTTP head."""

    name: str
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def timeline(
    receive_s: float,
    prepared_s: float | None,
    first_token_s: float | None,
    elapsed_s: float,
    phases: Phases | None,
) -> list[RequestPhase]:
    """Compute the phases of a request in order, each beginning where the one before ends.
    `receive_s` is the time to receive its body; the other times count from the end of the body. A
    time is None, and so is `phases`, if it is not known yet."""
    result: list[RequestPhase] = []

    def add(name: str, duration_s: float) -> None:
        start_s = result[-1].end_s if result else 0.0
        result.append(RequestPhase(name, start_s, duration_s))

    add("receive", receive_s)
    if prepared_s is None:
        add("prepare", elapsed_s)
        return result
    add("prepare", prepared_s)
    until_s = elapsed_s if first_token_s is None else first_token_s
    if phases is None:
        add("wait", until_s - prepared_s)  # router and decode worker have not reported yet
    else:
        add("route", phases.route_s)
        add("queue", max(0.0, phases.queue_s - phases.route_s))
        add("prefill", phases.prefill_s)
        add("transfer", phases.transfer_s)
        add("first_token", phases.first_token_s)
        add("return", max(0.0, receive_s + until_s - result[-1].end_s))
    if first_token_s is not None:
        add("decode", elapsed_s - first_token_s)
    return result


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The token counts of one request: prompt, prompt tokens from the prefix cache, and generated
    tokens."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class PlacedAttempt:
    """One attempt to run a request: when the router placed it, and the addresses of its decode and
    prefill workers."""

    attempt: bytes
    at_s: float  # since the request arrived
    decode: str
    prefill: str  # empty: no prefill worker was chosen


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """The state of a request at one moment; times are in seconds since the request arrived.

    `phase` is "preparing" (tokenizing the prompt), "placing" (waiting for the router to choose a
    worker), "prefill", "decode" or "ended". `phases` has the times of the phases; they are complete
    once the request has ended.
    """

    request_id: str  # shown to the client
    tenant: bytes
    model: str
    phase: str
    prefill_at: str  # "local", or the transport of the KV transfer; empty until known
    decode_at: str  # address of the decode worker; empty until placed
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    arrived: float  # time of the meter's clock
    prepared_s: float | None
    first_token_s: float | None
    elapsed_s: float  # until now, or until its end
    phases: Phases
    finish: str  # finish reasons, or the code of an error; empty until it has ended
    ids: tuple[str, ...]  # all ids by which its client may know it
    trace_id: str  # of its OpenTelemetry trace, or empty
    receive_s: float  # time to receive the body: from the request's head to its arrival
    attempts: tuple[PlacedAttempt, ...]  # the first MAX_ATTEMPTS
    first_phases: Phases | None  # of the prompt with the first token, once known

    def timeline(self) -> list[RequestPhase]:
        """Return the phases of the request in order, with start and duration in seconds."""
        times = self.prepared_s, self.first_token_s, self.elapsed_s
        return timeline(self.receive_s, *times, self.first_phases)


CountUsage = Callable[[Caller, str, RequestUsage], None]
"""Counts the tokens that a request of a caller has used of a model; returns at once."""


def uncounted(caller: Caller, model: str, usage: RequestUsage) -> None:
    """Discard the token usage of a request; the CountUsage of a gateway without a usage log."""


class RequestMetrics:
    """Measures one request with `clock`, in seconds; its `close` updates the metrics, counts the
    token usage and writes the request's log line."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        caller: Caller,
        clock: Callable[[], float],
        count_usage: CountUsage = uncounted,
        span: TraceSpan = NO_SPAN,
    ) -> None:
        self._metrics = metrics
        self._caller = caller
        self._clock = clock
        self._count_usage = count_usage
        self.arrived = clock()
        self.span = span
        self._begun: float | None = None
        self._ended: float | None = None
        self._model = ""
        self._prompt_tokens = 0
        self._itl: Observer | None = None  # of that model
        self._first: float | None = None
        self._first_choice: int | None = None
        self._first_phases: Phases | None = None
        self._last: dict[int, float] = {}
        self._counted = 0
        self.num_generated = 0  # tokens, of any choice
        self._cached = 0
        self._finishes: list[str] = []
        self._finish = ""
        self._phases = Phases()
        self._prefill_places: dict[str, None] = {}  # in order, each once
        self._decode = ""
        self._attempts: dict[bytes, PlacedAttempt] = {}

    @property
    def tenant(self) -> bytes:
        return self._caller.tenant.id

    @property
    def ids(self) -> tuple[str, ...]:
        return self._caller.ids

    def begin(self, model: str, prompt_tokens: int) -> None:
        self._begun = self._clock()
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._itl = self._metrics.itl.of(model)

    def next_turn(self, prompt_tokens: int) -> None:
        """Record the start of a further turn of a tool loop: add its prompt tokens, and drop the
        finish reasons of the turn before."""
        self._prompt_tokens += prompt_tokens
        self._last.clear()
        self._finishes.clear()

    def cut_short(self) -> None:
        """Record that a tool loop ends after a turn with tool calls, because a further turn is not
        possible: the finish reason becomes "length"."""
        self._finishes[:] = ["length"]

    def placed(self, placed: Placed) -> None:
        placement = placed.placement
        self._decode = placement.decode_address
        if placement.attempt not in self._attempts and len(self._attempts) < MAX_ATTEMPTS:
            at_s = self._clock() - self.arrived
            self._attempts[placement.attempt] = PlacedAttempt(
                placement.attempt, at_s, placement.decode_address, placed.prefill_address
            )

    def tokens(self, choice: int, count: int) -> None:
        """Record that `count` new tokens of a choice arrived now, for the times to the first token
        and between tokens."""
        self.num_generated += count
        now = self._clock()
        if self._first is None:
            self._first, self._first_choice = now, choice
            self.span.event("first token", now)
            self._metrics.ttft.labels(self._model).observe(now - self.arrived)
        last = self._last.get(choice)
        self._last[choice] = now
        if last is not None and count and self._itl is not None:
            self._itl.observe((now - last) / count, count)

    def ended(self, finish: str) -> None:
        self._finishes.append(finish)

    def finished(self, event: Finished, counts: Mapping[int, int]) -> None:
        """Record that the choices of one prompt have ended: add the phase times in `event`, and the
        number of returned tokens per choice in `counts`."""
        self._counted += sum(counts.values())
        if not event.HasField("phases"):  # no worker has reported the end
            return
        if self._first_phases is None and (not counts or self._first_choice in counts):
            self._first_phases = Phases()
            self._first_phases.CopyFrom(
                event.phases
            )  # a copy: the message would keep its whole batch alive
        self._cached += event.cached_tokens
        self._prefill_places[event.transport or "remote" if event.remote else "local"] = None
        for name in ("queue_s", "prefill_s", "transfer_s", "first_token_s"):
            slowest = max(getattr(self._phases, name), getattr(event.phases, name))
            setattr(self._phases, name, slowest)

    def close(self, error: BaseException | None) -> None:
        """End the measurement of a request, which has ended with an answer (`error` is None) or an
        error: update the metrics, count its usage and log it."""
        now = self._ended = self._clock()
        self._note_usage(error)
        if error is None:
            self._count(now - self.arrived)
            self._finish = ",".join(self._finishes)
        else:
            self._finish = ErrorCode.Name(_code(error))
            self._metrics.failures.labels(self._finish).inc()
        extra = {"request": self._caller.request_id}
        log.info("%s", self._line(now - self.arrived, error), extra=extra)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", self._details(error), extra=extra)
        if self.span.recorded:
            self._end_span("" if error is None else self._finish)

    def state(self) -> RequestSnapshot:
        """Return a snapshot of the request's state now, or at its end if it has ended."""
        end = self._clock() if self._ended is None else self._ended
        received = self._caller.received
        phase = "decode"
        if self._ended is not None:
            phase = "ended"
        elif self._begun is None:
            phase = "preparing"
        elif self._first is None:
            phase = "prefill" if self._decode else "placing"
        return RequestSnapshot(
            request_id=self._caller.shown_id,
            tenant=self._caller.tenant.id,
            model=self._model,
            phase=phase,
            prefill_at=",".join(self._prefill_places),
            decode_at=self._decode,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            generated_tokens=self.num_generated,
            arrived=self.arrived,
            prepared_s=None if self._begun is None else self._begun - self.arrived,
            first_token_s=None if self._first is None else self._first - self.arrived,
            elapsed_s=end - self.arrived,
            phases=self._phases,
            finish=self._finish,
            ids=self._caller.ids,
            trace_id=self.span.context.trace_id,
            receive_s=0.0 if received is None else max(0.0, self.arrived - received),
            attempts=tuple(self._attempts.values()),
            first_phases=self._first_phases,
        )

    def _end_span(self, error: str) -> None:
        state = self.state()
        received = self.arrived - state.receive_s
        for phase in state.timeline():
            began, ended = received + phase.start_s, received + phase.end_s
            self.span.set(**{f"pdserve__phase__{phase.name}_ms": 1e3 * phase.duration_s})
            if phase.name in ("receive", "prepare"):  # router and workers report the others
                self.span.phase(phase.name, began, ended)
        self.span.set(
            pdserve__request=self._caller.request_id,
            pdserve__request_ids=state.ids,
            pdserve__decode=state.decode_at or "none",
            pdserve__prefill_at=state.prefill_at or "none",
            pdserve__attempts=len(state.attempts),
            gen_ai__provider__name="pdserve",
            gen_ai__response__id=self._caller.request_id,
            gen_ai__request__model=state.model,
            gen_ai__response__model=state.model,
            gen_ai__response__finish_reasons=tuple(self._finishes),
            gen_ai__usage__input_tokens=state.prompt_tokens,
            gen_ai__usage__output_tokens=state.generated_tokens,
        )
        self.span.end(error)

    def _note_usage(self, error: BaseException | None) -> None:
        """Count the token usage of the ended request. After an error, tokens generated until then
        count; if there are none, nothing counts."""
        if error is None:
            usage = RequestUsage(self._prompt_tokens, self._cached, self._counted)
        elif self.num_generated:
            usage = RequestUsage(self._prompt_tokens, self._cached, self.num_generated)
        else:
            return
        self._count_usage(self._caller, self._model, usage)

    def _line(self, total_s: float, error: BaseException | None) -> str:
        """Return the request's log line: at most MAX_LINE characters, with the id that the log's
        format adds. It has the messages of the server's errors only, because others may quote the
        client's text."""
        status = 200 if error is None else HTTP_STATUS[_code(error)]
        head = f"{self._caller.route} {status} model="
        key = self._caller.tenant.name
        figures = [
            f"prompt={self._prompt_tokens}",
            f"completion={self._counted if error is None else self.num_generated}",
        ]
        if self._prefill_places:
            figures.append(f"prefill_at={','.join(self._prefill_places)}")
        if self._first is not None:
            figures.append(f"ttft={self._first - self.arrived:.3f}s")
        figures += [f"total={total_s:.3f}s", f"finish={self._finish}"]
        tail = f" {' '.join(figures)}"
        room = MAX_LINE - len(f"  request={self._caller.request_id}")
        message = f" ({error.message})" if isinstance(error, ServiceError) and status >= 500 else ""
        room_of_names = room - len(head) - len(tail) - min(len(message), MIN_MESSAGE)
        if key:
            key_len = room_of_names - MIN_MODEL - len(" key=")
            key = f" key={_shortened(key, max(MIN_KEY, key_len))}"
        model_len = room_of_names - len(key)
        model = _shortened(self._model or "-", max(MIN_MODEL, model_len))
        return _shortened(f"{head}{model}{key}{tail}{message}", room)

    def _details(self, error: BaseException | None) -> str:
        """Return what the request's log line leaves out: ids, workers, the time of each phase, and
        the message of an error."""
        caller, phases = self._caller, self._phases
        ids = {"client_id": caller.client_id, "header_id": caller.header_id}
        named = ids | {"decode": self._decode}
        names = "".join(f" {name}={value}" for name, value in named.items() if value)
        message = f" error: {error.message}" if isinstance(error, ServiceError) else ""
        return (
            f"request details: cached={self._cached} queue={phases.queue_s:.3f}s "
            f"prefill={phases.prefill_s:.3f}s transfer={phases.transfer_s:.3f}s "
            f"first_token={phases.first_token_s:.3f}s{names}{message}"
        )

    def _count(self, total_s: float) -> None:
        m = self._metrics
        m.e2e.labels(self._model).observe(total_s)
        if self._prefill_places:  # its phases are known
            m.queue.labels(self._model).observe(self._phases.queue_s)
            m.prefill.labels(self._model).observe(self._phases.prefill_s)
            if self._prefill_places.keys() - {"local"}:
                m.transfer.labels(self._model).observe(self._phases.transfer_s)
        if self._first is not None:
            m.decode.labels(self._model).observe(
                max(self._last.values(), default=self._first) - self._first
            )
        m.prompt_len.labels(self._model).observe(self._prompt_tokens)
        m.generation_len.labels(self._model).observe(self._counted)
        m.prompt_tokens.labels(self._model).inc(self._prompt_tokens)
        m.generation_tokens.labels(self._model).inc(self._counted)
        for finish in self._finishes:
            m.success.labels(self._model, finish).inc()


def _shortened(text: str, max_len: int) -> str:
    return text if len(text) <= max_len else f"{text[: max_len - 3]}..."


def _code(error: BaseException) -> ErrorCode:
    if isinstance(error, ServiceError):
        return error.code
    disconnected = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return CANCELLED if disconnected else INTERNAL


MAX_ENDED = 1000  # about 1 KB each, at most 8 KB: ids, attempts and finish reasons are bounded
MAX_SHOWN = 200  # on the page, of open requests and of ended requests each


class RequestLog:
    """The open and recently ended requests of this gateway. AdmissionLimits bound the number of
    open ones. At most MAX_ENDED ended ones are kept: above that, the oldest ended request of the
    tenant with the most ended requests is dropped."""

    def __init__(self) -> None:
        self._open: dict[int, RequestMetrics] = {}  # in the order of arrival
        self._ended: dict[bytes, deque[RequestSnapshot]] = {}  # by tenant; none is empty
        self._num_ended = 0

    def began(self, meter: RequestMetrics) -> None:
        """Add a request that has been admitted to the open requests."""
        self._open[id(meter)] = meter

    def ended(self, meter: RequestMetrics) -> None:
        """Move a request from the open to the ended ones, after `close` of its metrics. Does
        nothing for a request that was never added."""
        if self._open.pop(id(meter), None) is None:
            return
        self._ended.setdefault(meter.tenant, deque()).append(meter.state())
        self._num_ended += 1
        if self._num_ended > MAX_ENDED:
            tenant, states = max(self._ended.items(), key=lambda item: len(item[1]))
            states.popleft()
            self._num_ended -= 1
            if not states:
                del self._ended[tenant]

    def find(self, tenant: bytes, id_: str) -> RequestSnapshot | None:
        """Return a snapshot of the tenant's latest request with the id `id_`, open or ended; None
        if there is no such request."""
        for meter in reversed(self._open.values()):  # open requests are later than ended ones
            if meter.tenant == tenant and id_ in meter.ids:
                return meter.state()
        ended = reversed(self._ended.get(tenant, ()))
        return next((state for state in ended if id_ in state.ids), None)

    def open_of(self, tenant: bytes) -> list[RequestSnapshot]:
        """Return snapshots of the tenant's open requests, oldest first."""
        return [meter.state() for meter in self._open.values() if meter.tenant == tenant]

    def ended_of(self, tenant: bytes) -> list[RequestSnapshot]:
        """Return snapshots of the last MAX_SHOWN ended requests of the tenant, latest first."""
        return list(islice(reversed(self._ended.get(tenant, ())), MAX_SHOWN))
