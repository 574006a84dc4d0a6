"""Results of the Python API: outputs, deltas, tool calls, and the messages of a conversation.

Fields have vLLM's names where vLLM has such a field.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict


class Message(TypedDict, total=False):
    """One message of a conversation, in the form of OpenAI's chat API. Plain dicts work, too."""

    role: Required[str]  # system, developer, user, assistant or tool
    content: str | Sequence[Mapping[str, Any]] | None
    name: str
    tool_calls: Sequence[Mapping[str, Any]]  # made by the assistant
    tool_call_id: str  # the call that a message with role `tool` answers
    reasoning_content: str  # the assistant's reasoning


Conversation = Sequence[Message] | Sequence[Mapping[str, Any]]


class GenerationError(Exception):
    """A request failed in the engine: an internal error, or the engine was closed."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model makes; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """Return the arguments as a Python dict."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments

    def as_message_part(self) -> dict[str, Any]:
        """Return the call in the form of an entry in a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability in the model's distribution, before temperature, penalties
    and masks."""

    logprob: float
    decoded_token: str  # U+FFFD replaces incomplete characters


Logprobs = dict[int, Logprob]  # by token id: the token itself, the likeliest, the requested ids


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New content of one output in a stream. The output's last delta carries `finish_reason`."""

    index: int  # of the output, 0 to n - 1
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # each complete
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # empty, or one entry per token
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished output.

    `token_ids` includes the token that ended the output. `finish_reason` is "stop", "length" or
    "tool_calls". `stop_reason` is the stop string or the id from `stop_token_ids` that ended the
    output, None if the model ended it. `reasoning` and `tool_calls` are parsed from chat answers.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None  # one entry per token, if requested
    cumulative_logprob: float | None = None  # sum over all tokens, if logprobs are requested

    @property
    def message(self) -> Message:
        """The answer as the next message of its conversation."""
        message = Message(role="assistant", content=self.text)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_message_part() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt, with `n` outputs. Properties are those of the first output."""

    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    # One entry per prompt token, if requested; the first is None.
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> Message:
        return self.outputs[0].message
