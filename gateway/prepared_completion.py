"""A completion that is ready to run, and what its answer has besides deltas."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.gateway.admission import AdmittedRequest
from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.metrics import RequestMetrics
from pdserve.protos.common_pb2 import SamplingParams
from pdserve.text import AnswerFormat, Delta, RequestedSampling


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    text: str  # as echoed
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """One API call, ready to run. Choice c of prompt p has the index p * (n or best_of) + c."""

    id: str
    model: ServedModel
    prompts: Sequence[Prompt]
    sampling: RequestedSampling
    admitted: AdmittedRequest
    meter: RequestMetrics
    timeout_s: float
    queue_timeout_s: float
    continues: bool = False  # the answer continues the prompt's text
    echo: bool = False
    echo_only: bool = False  # the one generated token is not part of the answer
    cache_salt: bytes = b""
    priority: int = 0
    tenant: bytes = b""
    format: AnswerFormat = field(default_factory=AnswerFormat)  # how the model's output is read
    tool_loop: "ToolLoop | None" = None  # runs a request with one choice


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    inexact: bool = False  # uses KV or tokens of another KV identity
    reasoning_tokens: int = 0  # part of completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.inexact or other.inexact,
            self.reasoning_tokens + other.reasoning_tokens,
        )


Run = Callable[[PreparedCompletion], AsyncGenerator[Delta | Usage, None]]

WriteText = Callable[[int, str], bool]
"""Sends the next text of a choice to the client at once. Returns False if it did not: the caller
then sends the text."""


class ToolLoop(Protocol):
    """Loop that calls the model again, with the results of tools, until its answer is complete."""

    def stream(
        self, completion: PreparedCompletion, run: Run
    ) -> AsyncGenerator[Delta | Usage, None]: ...
