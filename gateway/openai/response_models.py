"""The answers of the OpenAI API as models, for its description; tests check real answers.

Clients must accept further fields, as OpenAI's do.
"""

from typing import Literal

from pydantic import RootModel

from pdserve.gateway.http import AnswerModel


class ErrorDetail(AnswerModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(AnswerModel):
    """The body of every error, and the last event of a stream that fails."""

    error: ErrorDetail


class PromptTokensDetails(AnswerModel):
    cached_tokens: int


class CompletionTokensDetails(AnswerModel):
    """`reasoning_tokens` counts the tokens of the reasoning before the answer."""

    reasoning_tokens: int


class UsageDetails(AnswerModel):
    """`inexact`: KV of other weights or numerics was used, so a rerun may give other tokens."""

    inexact: bool


class UsageObject(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    pdserve: UsageDetails


class ChunkUsage(AnswerModel):
    """The usage in a chunk of a stream: the counts so far, and at the end all counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    pdserve: UsageDetails | None = None


class AnswerLogprob(AnswerModel):
    token: str
    logprob: float | None
    bytes: list[int]


class ScoredChatToken(AnswerLogprob):
    top_logprobs: list[AnswerLogprob]


class ChatLogprobs(AnswerModel):
    content: list[ScoredChatToken]
    refusal: None


class PromptLogprob(AnswerModel):
    """A token at a position of the prompt; `rank` is set if it is among the most likely."""

    logprob: float | None
    rank: int | None = None
    decoded_token: str


class CalledFunction(AnswerModel):
    """`arguments` is a JSON text."""

    name: str
    arguments: str


class ToolCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustom(AnswerModel):
    name: str
    input: str


class CustomCall(AnswerModel):
    """A call of a tool whose input is a text."""

    id: str
    type: Literal["custom"]
    custom: CalledCustom


class AnswerMessage(AnswerModel):
    """The content is null if there are only calls or thoughts."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomCall] | None = None


class ChatChoice(AnswerModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(AnswerModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ChatBatchChoice(ChatChoice):
    """`index` is the index of the conversation."""

    prompt_token_ids: list[int] | None = None


class ChatBatch(ChatCompletion):
    """The answer of /v1/chat/completions/batch; `usage` sums up all conversations."""

    choices: list[ChatBatchChoice]  # type: ignore[assignment]


class FunctionDelta(AnswerModel):
    name: str | None = None
    arguments: str


class CustomDelta(AnswerModel):
    name: str | None = None
    input: str


class ToolCallDelta(AnswerModel):
    """A piece of a call: the first has its id and name, the others continue its arguments."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class MessageDelta(AnswerModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(AnswerModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(AnswerModel):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChunkUsage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(AnswerModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class TextCompletion(AnswerModel):
    """The answer of /v1/completions, or an event of a streamed one with the usage so far."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage | None = None


class EmbeddingObject(AnswerModel):
    """One vector; in base64 it is little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptUsage(AnswerModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(AnswerModel):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: PromptUsage


class ModelObject(AnswerModel):
    """A served model; if `id` is an alias, `root` is the model's name. Capabilities and default
    sampling are null until they are known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    capabilities: dict[str, bool | None]
    default_sampling_params: dict[str, float] | None
    architecture: str
    quantization: str
    weights_bytes: int
    weights_digest: str
    kv_identity: str
    numerics_id: str


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[ModelObject]


class TokenizeAnswer(AnswerModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(AnswerModel):
    prompt: str


class AppliedTemplate(AnswerModel):
    """The text of a chat's prompt."""

    prompt: str


class GenerationSettings(AnswerModel):
    """`params` is the sampling that the model recommends."""

    n_ctx: int
    params: dict[str, float]


class ServerProps(AnswerModel):
    """The answer of llama.cpp's /props; `total_slots` is the number of requests that this gateway
    process accepts at once."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str


class SlotToken(AnswerModel):
    n_decoded: int


class Slot(AnswerModel):
    """An open request of the client's own key."""

    id: int
    request_id: str
    model: str
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int
    next_token: list[SlotToken]


class Slots(RootModel[list[Slot]]):
    """The answer of /slots, oldest first."""


class ServerLoad(AnswerModel):
    """The answer of vLLM's /load: the number of open requests in the gateway, of all keys."""

    server_load: int


class TokenizerInfo(AnswerModel):
    """The answer of vLLM's /tokenizer_info, without the class that transformers would load."""

    model: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str
    eos_token: str
    chat_template: str
