"""The answers of /v1/responses, for its description; reply.py and output.py make them."""

from typing import Any, Literal

from pydantic import Field

from pdserve.gateway.http import AnswerModel
from pdserve.gateway.openai.response_models import ScoredChatToken, UsageDetails

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(AnswerModel):
    type: Literal["input_text"]
    text: str


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ScoredChatToken] | None = None


class ReasoningText(AnswerModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(AnswerModel):
    type: Literal["summary_text"]
    text: str


class ResponseMessage(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    status: Status
    content: list[InputText | OutputText]


class ResponseReasoning(AnswerModel):
    id: str
    type: Literal["reasoning"]
    summary: list[SummaryText]
    status: Status
    content: list[ReasoningText]


class ResponseCall(AnswerModel):
    """A call of a function of the client's; `arguments` is a JSON text."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResponseCustomCall(AnswerModel):
    """A call of a custom tool of the client's."""

    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ResponseCallOutput(AnswerModel):
    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: Status
    call_id: str
    output: str | list[InputText]


class OtherItem(AnswerModel):
    """A stored item of another provider's tools: its type, ids and status, and the text that the
    model sees."""

    id: str
    type: str


OutputItem = ResponseMessage | ResponseReasoning | ResponseCall | ResponseCustomCall


class InputTokensDetails(AnswerModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    pdserve: UsageDetails


class ResponseFailure(AnswerModel):
    code: str
    message: str


class IncompleteDetails(AnswerModel):
    reason: Literal["max_output_tokens"]


class ReasoningShown(AnswerModel):
    effort: str | None
    summary: Literal["detailed"] | None


class TextShown(AnswerModel):
    format: dict[str, Any]
    verbosity: str | None = None


class FunctionShown(AnswerModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None
    strict: bool


class CustomShown(AnswerModel):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceShown(AnswerModel):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionShown | CustomShown]


class ResponseObject(AnswerModel):
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


class ResponseEvent(AnswerModel):
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


class InputItemList(AnswerModel):
    """Input items, the newest first unless `order` is `asc`."""

    object: Literal["list"]
    data: list[OutputItem | ResponseCallOutput | OtherItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(AnswerModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(AnswerModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItemsQuery(AnswerModel):
    after: str = ""
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
