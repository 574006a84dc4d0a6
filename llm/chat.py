"""Chat input of the Python API: messages, options, and tools in OpenAI's format. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pdserve.engine.api import InvalidRequest
from pdserve.llm.outputs import Conversation
from pdserve.llm.sampling import invalid_requests
from pdserve.text import (
    ChatCompletionRequest,
    RequestedSampling,
    TemplateInput,
    Tool,
    ToolUse,
    make_tool_use,
)

ToolChoice = str | Mapping[str, Any]  # auto, none, required, or {"function": {"name": ...}}
_NAME = re.compile("[a-zA-Z0-9_.-]{1,128}")


class ChatOptions(TypedDict, total=False):
    """Keyword options of the chat methods."""

    tools: Sequence[Mapping[str, Any]]  # functions that the model may call
    tool_choice: ToolChoice
    parallel_tool_calls: bool  # allow several calls in one answer
    add_generation_prompt: bool  # the prompt ends with the start of the assistant's turn
    continue_final_message: bool  # the answer continues the last message
    chat_template_kwargs: Mapping[str, Any] | None  # variables for the model's chat template


def chat_request(
    messages: Conversation,
    sampling: RequestedSampling,
    priority: int = 0,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatCompletionRequest:
    """Build a request from ChatOptions. `add_generation_prompt` defaults to the opposite of
    `continue_final_message`. Raises InvalidRequest, TypeError for a non-conversation."""
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise TypeError('a conversation must be a list of messages, {"role", "content"}')
    adds_prompt = add_generation_prompt
    with invalid_requests():
        use = tool_use(tools, tool_choice, parallel=parallel_tool_calls)
        conversation = TemplateInput(
            messages,
            not continue_final_message if adds_prompt is None else adds_prompt,
            continue_final_message,
            chat_template_kwargs or {},
        )
    return ChatCompletionRequest("", conversation, sampling, priority=priority, tool_use=use)


def conversations(
    messages: Conversation | Sequence[Conversation],
) -> tuple[Sequence[Conversation], bool]:
    """Return the conversations as a sequence, and whether `messages` is a single one."""
    if isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping):
        return messages, False  # type: ignore[return-value]
    return [messages], True  # type: ignore[list-item]


def tool_use(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, parallel: bool
) -> ToolUse | None:
    """Parse tools and tool choice; return None without tools. Raises InvalidRequest, TextError."""
    parsed_tools = {
        f"tools[{index}].function": _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(tools)
    }
    match choice:
        case "auto" | "none" | "required":
            return make_tool_use(parsed_tools, choice, parallel=parallel)
        case {"function": {"name": str(name)}}:
            only = {"tool_choice": name}
            return make_tool_use(parsed_tools, "required", only, parallel=False)
    if isinstance(choice, Mapping):
        raise _refused("tool_choice", "tool_choice must contain the name of a tool")
    text = "tool_choice must be none, auto, required, or an object with a type"
    raise _refused("tool_choice", text)


def _tool(tool: Any, param: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        expected = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise _refused(param, f"{param} must have the form {expected}")
    name, parameters = function.get("name"), function.get("parameters")
    name_param, parameters_param = f"{param}.function.name", f"{param}.function.parameters"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected_name = "1 to 128 letters, digits, _, . or -"
        raise _refused(name_param, f"{name_param} must be {expected_name}, not {name!r:.80}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _refused(parameters_param, f"{parameters_param} must be a JSON schema")
    description = function.get("description") or ""
    strict = bool(function.get("strict"))
    return Tool(name, str(description), parameters, strict, parameters_param)


def _refused(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param)
