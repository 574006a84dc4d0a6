"""The answers of this API, for its description; reply.py makes the answers themselves."""

from typing import Any, Literal

from pdserve.gateway.http.docs.document import AnswerModel


class MessagesErrorDetail(AnswerModel):
    type: str
    message: str


class MessagesError(AnswerModel):
    """The body of every error, and the data of a stream's last event that fails."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class TextBlock(AnswerModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerModel):
    """What the model has thought. Clients send the signature back with it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(AnswerModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(AnswerModel):
    thinking_tokens: int


class Inexactness(AnswerModel):
    """`inexact`: KV of other weights or numerics was used, so a rerun may give other tokens."""

    inexact: bool


class MessageUsage(AnswerModel):
    """What is read from the cache is not counted as input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    pdserve: Inexactness
    service_tier: Literal["standard"] | None = None


class MessageObject(AnswerModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(AnswerModel):
    """A piece of a block, or at the end why the message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = (
        None
    )
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageEvent(AnswerModel):
    """An event of a streamed message; which fields it has depends on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageObject | None = None
    index: int | None = None
    content_block: AnswerBlock | None = None
    delta: BlockDelta | None = None
    usage: MessageUsage | None = None


class TokenCount(AnswerModel):
    input_tokens: int
