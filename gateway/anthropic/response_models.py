"""The answers of this API, for its description; reply.py makes the answers themselves."""

from typing import Any, Literal

from pdserve.gateway.http import AnswerModel


class MessagesErrorDetail(AnswerModel):
    type: str
    message: str


class MessagesError(AnswerModel):
    """The body of every error, and the data of the last event of a stream that fails."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class TextBlock(AnswerModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerModel):
    """The model's reasoning. Clients send it back together with the signature."""

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
    """`input_tokens` does not include the tokens that are read from the cache."""

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
    """A piece of a block, or at the end the reason why the message ended."""

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
    """An event of a streamed message; its fields depend on its type."""

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
