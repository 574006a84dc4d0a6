"""The answers of this API, for its description; the other files make the answers themselves.

Times are in nanoseconds.
"""

from typing import Any

from pdserve.gateway.http import AnswerModel
from pdserve.gateway.openai import ScoredChatToken


class OllamaError(AnswerModel):
    """The body of every error, and the last line of a stream that fails."""

    error: str


class CalledOllamaFunction(AnswerModel):
    index: int
    name: str
    arguments: dict[str, Any]


class CalledOllamaTool(AnswerModel):
    id: str
    function: CalledOllamaFunction


class OllamaAnswerMessage(AnswerModel):
    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[CalledOllamaTool] | None = None


class OllamaProgress(AnswerModel):
    """`load_duration` is the time until the prompt was ready, `prompt_eval_duration` the time from
    then to the first token. The last line of a stream has the counts and times."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ScoredChatToken] | None = None


class OllamaChat(OllamaProgress):
    """The answer of /api/chat, or a line of a streamed one."""

    message: OllamaAnswerMessage


class OllamaGenerated(OllamaProgress):
    """The answer of /api/generate, or a line of a streamed one."""

    response: str
    thinking: str | None = None
    tool_calls: list[CalledOllamaTool] | None = None


class OllamaDetails(AnswerModel):
    """Details of a model; unknown ones are empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaTag(AnswerModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(AnswerModel):
    """The answer of /api/tags."""

    models: list[OllamaTag]


class OllamaProcess(OllamaTag):
    """A model that workers serve; it is never unloaded."""

    expires_at: str
    context_length: int


class OllamaProcesses(AnswerModel):
    """The answer of /api/ps."""

    models: list[OllamaProcess]


class OllamaModel(AnswerModel):
    """The answer of /api/show. The template is the model's own, in jinja2."""

    modified_at: str
    template: str
    parameters: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(AnswerModel):
    version: str


class OllamaVectors(AnswerModel):
    """The answer of /api/embed. Each vector has length 1."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class OllamaVector(AnswerModel):
    """The answer of /api/embeddings: the vector as the model returns it."""

    embedding: list[float]
