"""Runs prompts that have one answer each at the router: an embedding, or a yes or no.

Ownership: a run owns its requests at the router; closing it early cancels them at once.
"""

import asyncio
import math
from array import array
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from operator import mul
from struct import pack
from typing import TypeVar

from pdserve.gateway.admission import AdmittedRequest
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.metrics import RequestMetrics
from pdserve.gateway.router_client import Upstream, merge
from pdserve.protos.common_pb2 import INTERNAL, SamplingParams, Start
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.capabilities import pooling_of
from pdserve.services.common.errors import ServiceError

AT_ONCE = 32  # inputs of one call at the router at once
T = TypeVar("T")
Answer = Callable[[RequestEvent], T | None]  # the answer in an event, if it has one


def shaped(values: Sequence[float], dimensions: int | None, normalizes: bool) -> "array[float]":
    """Return the first `dimensions` numbers (None: all) as float32, of length 1 if `normalizes`."""
    selected = values[:dimensions]
    length = math.hypot(*selected) if normalizes else 1.0
    return array("f", [value / length for value in selected] if length else selected)


def base64_of(vector: Sequence[float]) -> str:
    """Return the vector's numbers as little-endian float32, in base64."""
    return b64encode(pack(f"<{len(vector)}f", *vector)).decode()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine similarity, from -1 to 1; 0 if one vector is all zeros."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(map(mul, a, b)) / lengths if lengths else 0.0


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """One API call with several prompts, ready to run."""

    id: str
    model: ServedModel
    inputs: Sequence[Collection[int]]
    admitted: AdmittedRequest
    meter: RequestMetrics
    timeout_s: float
    queue_timeout_s: float
    cache_salt: bytes = b""
    priority: int = 0
    tenant: bytes = b""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))


class PoolingRuns:
    """Runner of a call's inputs, AT_ONCE at a time; answers come as they complete."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream = upstream
        self._clock = clock

    def embeddings(
        self, prepared: PreparedInputs
    ) -> AsyncGenerator[tuple[int, Sequence[float]], None]:
        """Yield each input's number and pooled state, not normalized. Raises ServiceError."""
        pooling = pooling_of(prepared.model.card)
        return self._run(prepared, Start(pool=True, pooling=pooling), _embedding)

    def scores(self, prepared: PreparedInputs) -> AsyncGenerator[tuple[int, float], None]:
        """Yield the number of each input and the probability of "yes" among "yes" and "no" as its
        next token. Raises ServiceError."""
        yes, no = prepared.model.card.score_token_ids
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=(yes, no)
        )
        return self._run(prepared, Start(params=params), lambda event: _score(event, yes, no))

    async def relevances(self, prepared: PreparedInputs) -> AsyncGenerator[tuple[int, float], None]:
        """Yield the number of each input and its score by the model's head. Raises ServiceError."""
        async with aclosing(self.embeddings(prepared)) as answers:
            async for number, values in answers:
                yield number, values[0]

    async def _run(
        self, prepared: PreparedInputs, template: Start, answer: Answer[T]
    ) -> AsyncGenerator[tuple[int, T], None]:
        inputs = enumerate(prepared.inputs)
        lanes = [
            self._lane(prepared, inputs, template, answer)
            for _ in range(min(AT_ONCE, len(prepared.inputs)))
        ]
        async with aclosing(merge(lanes)) as answers:
            async for numbered in answers:
                prepared.admitted.first_token()
                yield numbered
        prepared.meter.ended("stop")

    async def _lane(
        self,
        prepared: PreparedInputs,
        inputs: Iterator[tuple[int, Collection[int]]],
        template: Start,
        answer: Answer[T],
    ) -> AsyncGenerator[tuple[int, T], None]:
        """Run inputs one after the other. Lanes share the iterator, so each input runs once."""
        for number, ids in inputs:
            yield number, await self._run_one(prepared, number, ids, template, answer)

    async def _run_one(
        self,
        prepared: PreparedInputs,
        number: int,
        ids: Collection[int],
        template: Start,
        answer: Answer[T],
    ) -> T:
        value: T | None = None
        start = self._start(prepared, number, ids, template)
        async with aclosing(self._upstream.open(start)) as events:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "placed":
                    prepared.meter.placed(event.placed)
                elif kind == "failed":
                    raise ServiceError.from_failure(event.failed.failure)
                elif kind == "finished":
                    prepared.meter.finished(event.finished, {})
                else:
                    value = answer(event) if value is None else value
        if value is None:
            raise ServiceError(INTERNAL, "the answer ended before it was complete")
        await asyncio.sleep(0)  # other tasks run between two inputs
        return value

    def _start(
        self, prepared: PreparedInputs, number: int, ids: Collection[int], template: Start
    ) -> Start:
        start = Start()
        start.CopyFrom(template)
        is_multiple = len(prepared.inputs) > 1
        remaining_s = prepared.timeout_s - (self._clock() - prepared.meter.arrived)
        start.request = f"{prepared.id}-{number}" if is_multiple else prepared.id
        start.model = prepared.model.card.name
        start.cache_salt = prepared.cache_salt
        start.priority = prepared.priority
        start.tenant = prepared.tenant
        start.trace_parent = prepared.meter.span.context.parent
        start.trace_state = prepared.meter.span.context.state
        start.prompt_ids.extend(ids)
        start.tokenizer = prepared.model.card.kv_identity.tokenizer
        start.remaining_ms = max(1, int(remaining_s * 1000))
        start.queue_remaining_ms = max(1, int(prepared.queue_timeout_s * 1000))
        return start


def _embedding(event: RequestEvent) -> Sequence[float] | None:
    """Return the embedding as float32: a call may have thousands of them."""
    return array("f", event.embedding.values) if event.HasField("embedding") else None


def _score(event: RequestEvent, yes: int, no: int) -> float | None:
    """Return the probability of "yes". A softmax over two logits depends only on the difference of
    their log-probabilities."""
    if not event.HasField("tokens") or not event.tokens.logprobs:
        return None
    scores = event.tokens.logprobs[0]
    logprobs = dict(zip(scores.top_ids, scores.top_logprobs, strict=True))
    if yes not in logprobs or no not in logprobs:
        return None
    difference = logprobs[no] - logprobs[yes]
    if math.isnan(difference):
        raise ServiceError(INTERNAL, "the model returned no probability for yes and no")
    return 1 / (1 + math.exp(min(difference, 700.0)))  # beyond 700 exp overflows
