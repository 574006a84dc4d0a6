"""The fleet of the simulator of prefix routing: workers of both roles, and one run of a trace.

A `Placement` decides where a request runs; everything else is the same for every policy: decode's
single flight (the real PromisedPrefixes), its threshold, the hand-off, the delay of messages.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from prefix_trace import BLOCK_TOKENS, TraceRequest, at, leading
from prefix_worker import Job, SimulatedWorker, Speed, VirtualClock

from pdserve.services.decode.single_flight import PromisedPrefixes

DELAY_S = 0.001  # of a message
HANDOFF_S = 0.010  # from the end of a prompt at prefill to its KV at decode
MIN_SHARED = 512  # minimum tokens for a wait or a hand-off, as the router's threshold


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Workers by role; without prefill workers decode computes all prompts."""

    decodes: int = 16
    prefills: int = 0
    speed: Speed = field(default_factory=Speed)
    window_s: float = 300.0  # over which loads are compared, in addition to the whole run


@dataclass(eq=False, slots=True)
class PlacedRequest:
    """A request with the workers that were chosen for it."""

    request: TraceRequest
    decode: "DecodeWorker"
    prefill: SimulatedWorker | None
    listener: "Placement"
    attempt: bytes = field(default_factory=lambda: os.urandom(16))


class Placement(Protocol):
    """A policy: it gets requests, admits them somewhere, and is notified of their progress."""

    def arrived(self, request: TraceRequest) -> None:
        """Place it now or later."""

    def admitted(self, placed: PlacedRequest, ticket: bool, follows: bool) -> None:
        """Decode has admitted it; with a ticket its prefill is to begin."""

    def attached(self, placed: PlacedRequest) -> None:
        """The KV that it waited for is there."""

    def placed_again(self, placed: PlacedRequest, tokens: int) -> None:
        """It cannot continue there, where this many of its tokens are cached: choose again."""

    def prefill_done(self, placed: PlacedRequest) -> None:
        """Its KV is at decode."""

    def first_token(self, placed: PlacedRequest) -> None:
        """It has its first token."""

    def finished(self, placed: PlacedRequest) -> None:
        """It has all tokens."""


@dataclass(slots=True)
class _Waiting:
    placed: PlacedRequest
    local: bool


class DecodeWorker:
    """A decode worker's admission, as in services/decode, without faults."""

    def __init__(self, worker: SimulatedWorker, clock: VirtualClock, record: "Record") -> None:
        self.worker = worker
        self._clock = clock
        self._record = record
        self._prefixes = PromisedPrefixes()
        self._followers: dict[str, _Waiting] = {}

    def admit(self, placed: PlacedRequest) -> None:
        local, key = placed.prefill is None, placed.attempt.hex()
        blocks = placed.request.full_blocks
        chain = [block.to_bytes(4) for block in blocks]
        found = leading(blocks, self.worker.cache)
        shared = self._prefixes.find(chain, found)
        saved = 0 if shared is None else (shared.blocks - found) * BLOCK_TOKENS
        missing = placed.request.num_tokens - 1 - found * BLOCK_TOKENS
        if shared is not None and saved >= MIN_SHARED and 2 * saved >= missing:
            self._prefixes.follow(key, chain, shared)
            self._followers[key] = _Waiting(placed, local)
            self.worker.num_claims += 1
            self._say(placed.listener.admitted, placed, False, True)
            return
        self._prefixes.lead(key, chain, in_engine=local)
        if local:
            self._submit(placed)
        else:
            self.worker.num_claims += 1
            self.worker.expect(placed.request)
        self._say(placed.listener.admitted, placed, not local, False)
        self.worker.changed()

    def receive(self, placed: PlacedRequest) -> None:
        """Its KV has arrived here."""
        self.worker.num_claims -= 1
        self.worker.came(placed.request)
        self._submit(placed, has_kv=True)

    def _submit(self, placed: PlacedRequest, has_kv: bool = False) -> None:
        def computed() -> None:
            seconds = DELAY_S + (self.worker.speed.base_s if has_kv else 0.0)
            self._clock.after(seconds, lambda: self._first_token(placed))
            self._prefixes.arrived(placed.attempt.hex(), len(placed.request.full_blocks))
            self._prefixes.over(placed.attempt.hex())
            self._clock.after(0.0, self._poll)

        def finished() -> None:
            self._clock.after(DELAY_S, lambda: placed.listener.finished(placed))

        self.worker.submit(
            Job(
                request=placed.request,
                output_len=placed.request.output_len,
                since=self._clock.now,
                computed=computed,
                finished=finished,
                begun=lambda: self._prefixes.begun(placed.attempt.hex()),
                has_kv=has_kv,
            )
        )

    def _first_token(self, placed: PlacedRequest) -> None:
        self._record.ttft_s.append(self._clock.now - placed.request.arrival_s)
        placed.listener.first_token(placed)

    def _poll(self) -> None:
        while self._prefixes.changed:
            ended = self._prefixes.take()
            self.worker.num_claims -= len(ended.ready) + len(ended.lost)
            for key in ended.ready:
                waiting = self._followers.pop(key)
                placed, found = waiting.placed, self._found(waiting.placed)
                left = placed.request.num_tokens - 1 - found
                if left >= MIN_SHARED and not waiting.local:
                    self._give_back(placed, found)
                else:
                    self._submit(placed)
                    self._say(placed.listener.attached, placed)
            for key in ended.lost:
                placed = self._followers.pop(key).placed
                self._give_back(placed, self._found(placed))

    def _give_back(self, placed: PlacedRequest, tokens: int) -> None:
        self._prefixes.over(placed.attempt.hex())
        self._say(placed.listener.placed_again, placed, tokens)

    def _found(self, placed: PlacedRequest) -> int:
        return leading(placed.request.full_blocks, self.worker.cache) * BLOCK_TOKENS

    def _say(self, hear: Callable[..., None], *words: object) -> None:
        self._clock.after(DELAY_S, lambda: hear(*words))


@dataclass(slots=True)
class Record:
    """Observations of a run."""

    prompt_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)


class SimulatedFleet:
    """Workers around a clock."""

    def __init__(self, shape: FleetShape) -> None:
        self.shape = shape
        self.clock = VirtualClock()
        self.record = Record()
        workers = [
            SimulatedWorker(number, self.clock, shape.speed, shape.window_s)
            for number in range(shape.decodes + shape.prefills)
        ]
        self.decodes = [
            DecodeWorker(worker, self.clock, self.record) for worker in workers[: shape.decodes]
        ]
        self.prefills = workers[shape.decodes :]

    def start_prefill(self, placed: PlacedRequest) -> None:
        """Let the prefill worker compute the prompt and hand its KV to decode."""
        worker = placed.prefill
        assert worker is not None

        def computed() -> None:
            self.clock.after(HANDOFF_S, handed_over)

        def handed_over() -> None:
            worker.release(job)
            placed.decode.receive(placed)
            self.clock.after(DELAY_S, lambda: placed.listener.prefill_done(placed))

        job = Job(placed.request, 0, self.clock.now, computed)
        worker.submit(job)

    def run(self, trace: Sequence[TraceRequest], placement: Placement) -> dict[str, float]:
        """Replay a trace to its end; returns the figures."""

        def arrive(request: TraceRequest) -> None:
            self.record.prompt_tokens += request.num_tokens
            placement.arrived(request)

        for request in trace:
            self.clock.after(request.arrival_s, partial(arrive, request))
        self.clock.run()
        if len(self.record.ttft_s) != len(trace):
            raise RuntimeError(f"{len(trace) - len(self.record.ttft_s)} requests had no token")
        return self._figures(trace[-1].arrival_s)

    def _figures(self, until_s: float) -> dict[str, float]:
        groups = [[d.worker for d in self.decodes], self.prefills]
        computed = sum(w.work.prompt_tokens for group in groups for w in group)
        ttft = sorted(self.record.ttft_s)
        figures = {
            "hit_rate": 1 - computed / self.record.prompt_tokens,
            "ttft_mean_s": sum(ttft) / len(ttft),
            "ttft_p50_s": at(ttft, 0.5),
            "ttft_p99_s": at(ttft, 0.99),
        }
        names = ("decode", "prefill") if self.prefills else ("worker",)
        for name, group in zip(names, groups, strict=False):
            figures[f"{name}_load"] = unevenness([w.work.seconds for w in group])
            full = int(until_s / self.shape.window_s)
            windows = [
                unevenness([(*w.work.windows, *[0.0] * full)[n] for w in group])
                for n in range(full)
            ]
            figures[f"{name}_load_windows"] = at(sorted(windows), 0.5)
            figures[f"{name}_busy"] = sum(w.work.seconds for w in group) / len(group) / until_s
        return {name: round(value, 3) for name, value in figures.items()}


def unevenness(loads: Sequence[float]) -> float:
    """The largest value over the mean."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
