"""One attempt at a request as the decode worker serves it: its output so far, and the seconds that
it spends in each phase."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.engine.api import FinishReason, NewTokens, Pooled, PromptScored, Request, TokenLogprob
from pdserve.engine.handoff.incoming import Received
from pdserve.protos import common_pb2 as pb
from pdserve.protos.worker_pb2 import DecodeEvent, Resume, Ticket
from pdserve.services.common.rpc import NumberedChoice, TokensOutbox
from pdserve.services.common.tracing import NO_SPAN, TraceSpan
from pdserve.services.decode.convert import to_tokens
from pdserve.services.decode.lease_machine import Lease
from pdserve.services.worker.core import RouterSession

DecodeOutbox = TokensOutbox[DecodeEvent]
DecodeSession = RouterSession[DecodeOutbox]


MAX_IDS = 1024  # ids repeated in one event; fewer with log-probabilities:
MAX_LOGPROBS = 256


class Transcript:
    """All output of a request since its first start, so that it can be sent again from any point:
    ids, log-probabilities and finish reasons of its choices, or its embedding."""

    def __init__(self, request: Request) -> None:
        self._key = request.key
        self._scored = request.params.logprobs is not None
        num_choices = len(request.choices) or request.params.n
        initial_ids = [list(choice.generated_ids) for choice in request.choices]
        self._ids: list[list[int]] = initial_ids or [[] for _ in range(num_choices)]
        self._base = [len(ids) for ids in self._ids]  # ids that other attempts generated
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._ends: list[FinishReason | None] = [None] * num_choices
        self._prompt: PromptScored | Pooled | None = None  # output for the prompt
        self._prompt_len = len(request.prompt_ids)

    @property
    def weight(self) -> int:
        """Approximate memory use of the request's output and prompt; the unit is the memory of one
        token id."""
        scores = [row for choice in self._logprobs for row in choice]
        scores += self._prompt.logprobs if isinstance(self._prompt, PromptScored) else ()
        candidates = sum(1 + len(score.top) for score in scores)
        candidates += len(self._prompt.values) if isinstance(self._prompt, Pooled) else 0
        return self._prompt_len + sum(map(len, self._ids)) + 4 * candidates

    def take(self, event: NewTokens | PromptScored | Pooled) -> None:
        """Append the output in an event of the engine; the events of one choice must come in
        order."""
        if not isinstance(event, NewTokens):
            self._prompt = event
            return
        self._ids[event.choice] += event.ids
        if event.logprobs:
            self._logprobs[event.choice] += event.logprobs
        if event.finish is not None:
            self._ends[event.choice] = event.finish

    def covers(self, counts: Sequence[int]) -> bool:
        """Return whether all output after the first `counts` ids of each choice can be sent again.

        It cannot if it includes log-probabilities of ids that another attempt generated, because
        these are unknown here.
        """
        return not self._scored or all(
            self._count(counts, choice) >= base for choice, base in enumerate(self._base)
        )

    def since(self, counts: Sequence[int]) -> Iterator[NewTokens | PromptScored | Pooled]:
        """Yield the output for the prompt, and all output after the first `counts` ids of each
        choice, as events of limited size; a missing count is 0."""
        if self._prompt is not None:
            yield self._prompt
        for choice in range(len(self._ids)):
            yield from self._choice_since(choice, self._count(counts, choice))

    def _choice_since(self, choice: int, count: int) -> Iterator[NewTokens]:
        ids, base, end = self._ids[choice], self._base[choice], self._ends[choice]
        max_ids = MAX_LOGPROBS if self._scored else MAX_IDS
        start = min(count, len(ids))
        while start < len(ids):
            stop = min(len(ids), start + max_ids)
            logprobs = self._logprobs[choice][max(0, start - base) : max(0, stop - base)]
            finish = end if stop == len(ids) else None
            yield NewTokens(
                self._key, choice, start, tuple(ids[start:stop]), tuple(logprobs), finish
            )
            start = stop
        if end is not None and count >= len(ids):
            yield NewTokens(self._key, choice, len(ids), (), (), end)

    @staticmethod
    def _count(counts: Sequence[int], choice: int) -> int:
        return counts[choice] if choice < len(counts) else 0


@dataclass(eq=False, slots=True)
class ServedAttempt:
    """State of one attempt at a request on this decode worker. Times are readings of
    time.monotonic, or 0 while what they record has not happened."""

    attempt: bytes
    name: str  # the request's public id
    epoch: int
    request: Request
    session: DecodeSession
    remote: bool
    arrived: float
    lease: Lease
    transcript: Transcript
    span: TraceSpan = NO_SPAN
    prefill_incarnation: bytes = b""  # the worker that sends its KV
    ticket: Ticket | None = None  # for that worker
    admitted: bool = False  # Admitted was sent to the router
    resume: tuple[DecodeSession, Resume] | None = None  # a Resume that came before the admission
    follows: bool = False  # waits for the KV of another attempt
    last: DecodeEvent | None = None  # Finished or Failed
    scheduled: float = 0.0
    computed: float = 0.0
    first_token: float = 0.0
    received: Received | None = None
    num_generated: int = 0
    # The choices as token rows name them, by index.
    numbered: dict[int, NumberedChoice] = field(default_factory=dict)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def stop_timers(self) -> None:
        """Cancel the timers of the attempt's deadlines."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def send(self, event: NewTokens) -> None:
        """Send new tokens to the router. If possible, a single token is sent as a row, the compact
        form."""
        outbox = self.session.outbox
        if len(event.ids) == 1 and not event.logprobs and event.finish is None:
            choice = self.numbered.get(event.choice)
            if choice is None or choice.epoch != self.epoch:
                choice = NumberedChoice(self.name, self.attempt, self.epoch, event.choice)
                self.numbered[event.choice] = choice
            if outbox.put_token(choice, event.position, event.ids[0]):
                return
        outbox.put(DecodeEvent(tokens=to_tokens(self.name, self.attempt, self.epoch, event)))

    def phases(self) -> pb.Phases:
        """Return the seconds of the attempt's phases (queue, prefill, transfer, first token); their
        sum is the time from Admit to the first token."""
        end = self.first_token or self.computed or self.arrived
        if self.received is not None:
            times = self.received.times
            # Waiting for blocks after the prompt was computed is queueing, not transfer.
            computed = max(times.computed or times.claimed, times.claimed)
            wait = max(0.0, times.granted - computed)
            queue_s = times.claimed - self.arrived + wait
            prefill_s = computed - times.claimed
            transfer_s = times.committed - computed - wait
            return pb.Phases(
                queue_s=queue_s,
                prefill_s=prefill_s,
                transfer_s=transfer_s,
                first_token_s=end - times.committed,
            )
        scheduled = self.scheduled or end
        computed = self.computed or end
        return pb.Phases(
            queue_s=scheduled - self.arrived,
            prefill_s=computed - scheduled,
            first_token_s=end - computed,
        )

    def end_span(self, error: str, now: float) -> None:
        """End the trace span of the attempt. `error`: why the attempt did not finish, or empty."""
        if not self.span.recorded:
            return
        if self.received is not None:
            times = self.received.times
            computed = max(times.computed or times.claimed, times.claimed)
            self.span.phase("queue", self.arrived, times.claimed)
            self.span.phase("prefill", times.claimed, computed)
            self.span.phase("transfer", computed, times.committed)
            ready = times.committed
            self.span.set(
                pdserve__transport=self.received.transport,
                pdserve__received_bytes=self.received.num_bytes,
            )
        else:
            scheduled = self.scheduled or self.first_token or now
            ready = self.computed or self.first_token or now
            self.span.phase("queue", self.arrived, scheduled)
            self.span.phase("prefill", scheduled, ready)
        if self.first_token:
            self.span.phase("first token", ready, self.first_token)
            self.span.phase("tokens", self.first_token, now)
        self.span.set(
            pdserve__request=self.name,
            pdserve__attempt=self.attempt.hex(),
            pdserve__prompt_tokens=len(self.request.prompt_ids),
            pdserve__generated_tokens=self.num_generated,
            pdserve__remote_prefill=self.received is not None,
        )
        self.span.end(error)
        self.span = NO_SPAN  # a span ends once

    def finished(self, cached_tokens: int) -> pb.Finished:
        """Return the event Finished of the attempt. `cached_tokens`: the engine's number of cached
        prompt tokens, used only if no KV was received for the attempt."""
        if self.received is not None:
            cached_tokens = self.received.cached_tokens
        return pb.Finished(
            request=self.name,
            attempt=self.attempt,
            epoch=self.epoch,
            cached_tokens=cached_tokens,
            remote=self.received is not None,
            transport=self.received.transport if self.received else "",
            phases=self.phases(),
            inexact=self.received is not None and self.received.inexact,
        )

    def log_line(self, finished: pb.Finished) -> str:
        """Return the token counts and the phases of the attempt as one line of text for the log."""
        phases = finished.phases
        prefill = (
            f"remote prefill over {finished.transport}" if finished.remote else "local prefill"
        )
        if finished.inexact:
            prefill += " with another KV identity"
        return (
            f"{len(self.request.prompt_ids)} + {self.num_generated} tokens, "
            f"{finished.cached_tokens} cached, {prefill}: queue {phases.queue_s:.3f} s, "
            f"prefill {phases.prefill_s:.3f} s, transfer {phases.transfer_s:.3f} s, "
            f"first token {phases.first_token_s:.3f} s"
        )
