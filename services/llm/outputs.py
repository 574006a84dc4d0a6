"""What the Python API gives back: outputs, pieces of them, and the messages of a conversation.

Where vLLM has a name for a field it is that one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict


class Message(TypedDict, total=False):
    """One message of a conversation, as OpenAI's chat API has it. Plain dicts are messages, too."""

    role: Required[str]  # system, developer, user, assistant or tool
    content: str | Sequence[Mapping[str, Any]] | None
    name: str
    tool_calls: Sequence[Mapping[str, Any]]  # of the assistant
    tool_call_id: str  # which call a message of role `tool` answers
    reasoning_content: str  # what the assistant thought


Conversation = Sequence[Message] | Sequence[Mapping[str, Any]]


class GenerationError(Exception):
    """The engine gave a request up: an internal failure, or it was closed."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asks for; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments as Python has them."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments

    def as_message_part(self) -> dict[str, Any]:
        """As the `tool_calls` of a message have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability by the model's own distribution, before temperature,
    penalties and masks."""

    logprob: float
    decoded_token: str  # U+FFFD stands for parts of characters


Logprobs = dict[int, Logprob]  # by token id: the token itself, the likeliest, those asked for


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new in one output of a stream. Its last one carries `finish_reason`."""

    index: int  # of the output, below n
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # each whole
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # empty, or one for each token
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished output.

    `token_ids` end with the token that ended it. `finish_reason` is "stop", "length" or
    "tool_calls"; `stop_reason` the stop string or the id of `stop_token_ids` that ended it, None if
    the model itself did. `reasoning` and `tool_calls` are parsed from the answers of a chat.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None  # one for each token, if asked for
    cumulative_logprob: float | None = None  # of all tokens, if logprobs were asked for

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
    """The answer to one prompt, with `n` outputs. Its properties are those of the first."""

    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int  # of the prompt, whose keys and values were there already
    # One for each token of the prompt, if asked for; the first has none.
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
