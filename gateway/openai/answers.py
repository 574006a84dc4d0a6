"""The answers of the OpenAI API as models, for its description; tests hold real answers to them.

Clients must take further fields, as OpenAI's do.
"""

from typing import Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(BaseModel):
    """The body of every error, and the last event of a stream that fails."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """`reasoning_tokens`: of what the model thinks before it answers."""

    reasoning_tokens: int


class UsageDetails(BaseModel):
    """`inexact`: KV of other weights or numerics was used, so a rerun may give other tokens."""

    inexact: bool


class UsageObject(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    pdserve: UsageDetails


class ChunkUsage(BaseModel):
    """Of a stream: what has been counted so far, or at its end all."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    pdserve: UsageDetails | None = None


class AnswerLogprob(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int]


class ScoredChatToken(AnswerLogprob):
    top_logprobs: list[AnswerLogprob]


class ChatLogprobs(BaseModel):
    content: list[ScoredChatToken]
    refusal: None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | None = None


class MessageDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChunkChoice(BaseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChunkUsage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(BaseModel):
    """The answer of /v1/completions, and with `usage` so far an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage | None = None


class ModelObject(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    capabilities: dict[str, bool]
    architecture: str
    quantization: str
    weights_bytes: int
    weights_digest: str
    kv_identity: str
    numerics_id: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelObject]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str
