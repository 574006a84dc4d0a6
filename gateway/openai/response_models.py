"""The responses of the OpenAI API as models, for its description; tests check real responses.

Clients must accept further fields, as OpenAI's do. This file is long because it describes every
route of the API.
"""

from typing import Any, Literal

from pydantic import Field, RootModel

from pdserve.gateway.http.docs import ResponseModel


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(ResponseModel):
    """The body of every error, and the last event of a stream that fails."""

    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """`reasoning_tokens` counts the tokens of the reasoning before the answer."""

    reasoning_tokens: int


class UsageDetails(ResponseModel):
    """`inexact`: KV of other weights or numerics was used, so a rerun may give other tokens."""

    inexact: bool


class PromptUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class ChunkUsage(PromptUsage):
    """The usage in a chunk of a stream: the counts so far, and at the end all counts."""

    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    pdserve: UsageDetails | None = None


class UsageObject(PromptUsage):
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    pdserve: UsageDetails


class AnswerLogprob(ResponseModel):
    token: str
    logprob: float | None
    bytes: list[int]


class ScoredChatToken(AnswerLogprob):
    top_logprobs: list[AnswerLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ScoredChatToken]
    refusal: None


class PromptLogprob(ResponseModel):
    """A token at a position of the prompt; `rank` is set if it is among the most likely."""

    logprob: float | None
    rank: int | None = None
    decoded_token: str


class CalledFunction(ResponseModel):
    """`arguments` is a JSON text."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustom(ResponseModel):
    name: str
    input: str


class CustomCall(ResponseModel):
    """A call of a tool whose input is a text."""

    id: str
    type: Literal["custom"]
    custom: CalledCustom


class AnswerMessage(ResponseModel):
    """The content is null if there are only calls or thoughts."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomCall] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
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


class FunctionDelta(ResponseModel):
    name: str | None = None
    arguments: str


class CustomDelta(ResponseModel):
    name: str | None = None
    input: str


class ToolCallDelta(ResponseModel):
    """A piece of a call: the first has its id and name, the others continue its arguments."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class MessageDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(ResponseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseModel):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChunkUsage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class TextCompletion(ResponseModel):
    """The answer of /v1/completions, or an event of a streamed one with the usage so far."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage | None = None


class EmbeddingObject(ResponseModel):
    """One vector; in base64 it is little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(ResponseModel):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: PromptUsage


class ModelObject(ResponseModel):
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


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelObject]


class TokenizeAnswer(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(ResponseModel):
    prompt: str


class AppliedTemplate(ResponseModel):
    """The text of a chat's prompt."""

    prompt: str


class GenerationSettings(ResponseModel):
    """`params` is the sampling that the model recommends."""

    n_ctx: int
    params: dict[str, float]


class ServerProps(ResponseModel):
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


class SlotToken(ResponseModel):
    n_decoded: int


class Slot(ResponseModel):
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


class ServerLoad(ResponseModel):
    """The answer of vLLM's /load: the number of open requests in the gateway, of all keys."""

    server_load: int


class TokenizerInfo(ResponseModel):
    """The answer of vLLM's /tokenizer_info, without the class that transformers would load."""

    model: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str
    eos_token: str
    chat_template: str


Status = Literal["in_progress", "completed", "incomplete"]


class InputText(ResponseModel):
    type: Literal["input_text"]
    text: str


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ScoredChatToken] | None = None


class ReasoningText(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(ResponseModel):
    type: Literal["summary_text"]
    text: str


class ResponseItem(ResponseModel):
    id: str
    status: Status


class ResponseMessage(ResponseItem):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText]


class ResponseReasoning(ResponseItem):
    type: Literal["reasoning"]
    summary: list[SummaryText]
    content: list[ReasoningText]


class ResponseCall(ResponseItem):
    """A call of a function of the client's; `arguments` is a JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResponseCustomCall(ResponseItem):
    """A call of one of the client's custom tools."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ResponseCallOutput(ResponseItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[InputText]


class OtherItem(ResponseModel):
    """A stored item of another provider's tools: its type, ids and status, and the text that the
    model sees."""

    id: str
    type: str


OutputItem = ResponseMessage | ResponseReasoning | ResponseCall | ResponseCustomCall


class InputTokensDetails(ResponseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    pdserve: UsageDetails


class ResponseFailure(ResponseModel):
    code: str
    message: str


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class ReasoningShown(ResponseModel):
    effort: str | None
    summary: Literal["detailed"] | None


class TextShown(ResponseModel):
    format: dict[str, Any]
    verbosity: str | None = None


class FunctionShown(ResponseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None
    strict: bool


class CustomShown(ResponseModel):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceShown(ResponseModel):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionShown | CustomShown]


class ResponseObject(ResponseModel):
    """A response: the parameters of its request, and its output."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None = None
    top_p: float | None = None
    text: TextShown
    tool_choice: str | dict[str, Any]
    tools: list[FunctionShown | CustomShown | NamespaceShown]
    top_logprobs: int
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(ResponseModel):
    """An event of a streamed response; its fields depend on its type. The last event is
    response.completed, response.incomplete or response.failed."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    summary_index: int | None = None
    part: OutputText | ReasoningText | SummaryText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ScoredChatToken] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None


class ListPage(ResponseModel):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputItemList(ListPage):
    """Input items, the newest first unless `order` is `asc`."""

    data: list[OutputItem | ResponseCallOutput | OtherItem]


class ResponseDeleted(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class FileUpload(ResponseModel):
    """A form with a file and its purpose. Send `purpose` before the file if possible."""

    purpose: Literal["batch"]
    file: bytes


class FileObject(ResponseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(ListPage):
    data: list[FileObject]


class FileDeleted(ResponseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RequestCounts(ResponseModel):
    total: int
    completed: int
    failed: int


class BatchErrors(ResponseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]


class BatchObject(ResponseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(ListPage):
    data: list[BatchObject]


class UsageSum(ResponseModel):
    """One row; dimensions not grouped by are null."""

    object: Literal["usage.result"]
    num_model_requests: int
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    model: str | None
    api_key_id: str | None
    session_id: str | None


class UsageBucket(ResponseModel):
    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[UsageSum]


class UsagePage(ResponseModel):
    object: Literal["page"]
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class PageQuery(ResponseModel):
    after: str = ""
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class FilesQuery(PageQuery):
    limit: int = Field(10_000, ge=1, le=10_000)
    purpose: str = ""


class UsageReportQuery(ResponseModel):
    start_time: int = Field(ge=0, le=1 << 40)
    end_time: int = Field(ge=0, le=1 << 40)
    bucket_width: Literal["1h", "1d"] = "1d"
    group_by: list[Literal["model", "api_key_id", "session_id"]] = Field(max_length=3)
    limit: int = Field(ge=1, le=168)
    page: int = Field(ge=0, le=1 << 40)
    models: list[str] = Field(max_length=100)
    session_ids: list[str] = Field(max_length=100)
