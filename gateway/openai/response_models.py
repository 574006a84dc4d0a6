"""The responses of OpenAI's API as pydantic models, for the OpenAPI document only. Tests check that
real responses match them.

Clients must accept further fields, as with OpenAI's own API. This file is long because it describes
every route of the API.
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
    """The JSON body of every error response, and the data of the last event of a stream that ends
    with an error."""

    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """Details of the generated tokens: `reasoning_tokens` is the number of tokens of the reasoning
    before the answer."""

    reasoning_tokens: int


class UsageDetails(ResponseModel):
    """`inexact` is true if KV cache blocks computed with other weights or numerics were used, so
    that the same request may give other tokens."""

    inexact: bool


class PromptUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class ChunkUsage(PromptUsage):
    """The token counts in a chunk of a stream: the counts so far, without the details; in the last
    chunk, all counts."""

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
    """The log-probability of a token at a position of the prompt. `rank` is set if the token is
    among the most likely tokens at that position."""

    logprob: float | None
    rank: int | None = None
    decoded_token: str


class CalledFunction(ResponseModel):
    """The function in a tool call; `arguments` is JSON text."""

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
    """A call of a custom tool, whose input is a text."""

    id: str
    type: Literal["custom"]
    custom: CalledCustom


class AnswerMessage(ResponseModel):
    """The assistant's message. `content` is null if the message has only tool calls or
    reasoning."""

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
    """The answer to one conversation of a batch; `index` is the position of that conversation in
    the request."""

    prompt_token_ids: list[int] | None = None


class ChatBatch(ChatCompletion):
    """The answer of /v1/chat/completions/batch; `usage` is the sum over all conversations."""

    choices: list[ChatBatchChoice]  # type: ignore[assignment]


class FunctionDelta(ResponseModel):
    name: str | None = None
    arguments: str


class CustomDelta(ResponseModel):
    name: str | None = None
    input: str


class ToolCallDelta(ResponseModel):
    """A piece of a tool call: the first piece has the call's id and name, the others continue its
    arguments or its input."""

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
    """One event of a streamed chat completion."""

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
    """The answer of /v1/completions, or one event of its stream. In an event, `usage` has the
    counts so far."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage | None = None


class EmbeddingObject(ResponseModel):
    """The vector of one input: a list of numbers, or the base64 text of little-endian float32
    numbers."""

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
    """A served model. If `id` is an alias, `root` is the model's own name. Capabilities and default
    sampling parameters are null until they are known."""

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
    """The answer of /apply-template: the text of a chat's prompt."""

    prompt: str


class GenerationSettings(ResponseModel):
    """Generation settings in llama.cpp's format; `params` are the sampling parameters that the
    model recommends."""

    n_ctx: int
    params: dict[str, float]


class ServerProps(ResponseModel):
    """The answer of /props, as in llama.cpp. `total_slots` is the number of requests that this
    gateway process accepts at once."""

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
    """One open request of the client's own key, in llama.cpp's format."""

    id: int
    request_id: str
    model: str
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int
    next_token: list[SlotToken]


class Slots(RootModel[list[Slot]]):
    """The answer of /slots, as in llama.cpp: the open requests of the client's key, oldest
    first."""


class ServerLoad(ResponseModel):
    """The answer of /load, as in vLLM: the number of open requests of all keys in the gateway."""

    server_load: int


class TokenizerInfo(ResponseModel):
    """The answer of /tokenizer_info, as in vLLM but without the name of a transformers class."""

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
    """A call of a function of the client; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResponseCustomCall(ResponseItem):
    """A call of a custom tool of the client; `input` is a text."""

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
    """A stored input item of a type that only another provider's tools use. Besides id and type, it
    may have a status, a call id, and the fields whose text the model sees."""

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
    """A response of /v1/responses: the parameters of its request, and its output."""

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
    """One event of a streamed response of /v1/responses; its fields depend on its type. The last
    event is response.completed, response.incomplete or response.failed."""

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
    """A page of a response's input items, the newest first unless `order` is `asc`."""

    data: list[OutputItem | ResponseCallOutput | OtherItem]


class ResponseDeleted(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class FileUpload(ResponseModel):
    """A multipart form with a file and its purpose. Send `purpose` before the file if possible, so
    that an error is returned before the upload."""

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
    """The usage of one bucket, or of one group in it. The fields model, api_key_id and session_id
    are null unless the report is grouped by them."""

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


MAX_LISTED_FILES = 1000


class FilesQuery(PageQuery):
    limit: int = Field(MAX_LISTED_FILES, ge=1, le=MAX_LISTED_FILES)
    purpose: str = ""


class UsageReportQuery(ResponseModel):
    start_time: int = Field(ge=0, lt=1 << 40)
    end_time: int = Field(ge=1, le=1 << 40)
    bucket_width: Literal["1h", "1d"] = "1d"
    group_by: list[Literal["model", "api_key_id", "session_id"]]
    limit: int = Field(ge=1, le=168)
    page: int = Field(ge=0, lt=1 << 40)
    models: list[str] = Field(max_length=100)
    session_ids: list[str] = Field(max_length=100)
