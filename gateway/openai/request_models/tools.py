"""The fields of a chat that define which tools its model may call, and how."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import model_validator

from pdserve.gateway.http import (
    MAX_TOOLS,
    OMITTED_TYPE,
    ArgumentSchema,
    Handling,
    ToolDescription,
    ToolName,
    check_served,
    check_tools,
    log_unsupported,
)
from pdserve.gateway.openai.custom_input import CustomFormat, custom_tool
from pdserve.gateway.openai.request_models.base import Body
from pdserve.gateway.openai.request_models.members import TOOL_CHOICES, TOOLS
from pdserve.gateway.sampling import refuse
from pdserve.services.common.errors import quoted
from pdserve.text import Tool, ToolUse

# Anthropic and Mistral call it "any".
MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


class FunctionBody(Body):
    """A function."""

    name: ToolName
    description: ToolDescription | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None

    def tool(self, path: str) -> Tool:
        """Return the tool; `path` is its place in the request."""
        description, param = self.description or "", f"{path}.parameters"
        return Tool(self.name, description, self.parameters, bool(self.strict), param)


class CustomBody(Body):
    """A tool whose input is a text."""

    name: ToolName
    description: ToolDescription | None = None
    format: CustomFormat | None = None

    def tool(self, path: str) -> Tool:
        """Return the tool; `path` is its place in the request."""
        return custom_tool(self.name, self.description or "", self.format, f"{path}.format")


class ToolBody(Body):
    """A tool. Tools that the client does not run itself are left out."""

    type: str
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        """Accept the form of /v1/responses, whose fields are beside the type."""
        if _is_left_out(value):
            return {"type": value["type"]}
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in ("function", "custom") and kind not in value and "name" in value:
            return {"type": kind, kind: value}
        return value

    def tool(self, path: str) -> Tool | None:
        """Return the tool, None if it is left out. Raises ServiceError."""
        if TOOLS.get(self.type, OMITTED_TYPE).fate is Handling.LEFT_OUT:
            return None
        body_path = f"{path}.{self.type}"
        body = self.custom if self.type == "custom" else self.function
        if body is None:
            raise refuse(body_path, f"{body_path} is required")
        return body.tool(body_path)


def tool_use(bodies: Sequence[ToolBody], choice: Any, parallel: bool | None) -> ToolUse | None:
    """Combine `tools`, `tool_choice` and `parallel_tool_calls`. Raises ServiceError."""
    tools_by_name: dict[str, Tool] = {}
    left_out = []
    for index, body in enumerate(bodies):
        tool = body.tool(f"tools[{index}]")
        if tool is None:
            left_out.append(body.type)
        elif tool.name in tools_by_name:
            text = f"two tools have the name {quoted(tool.name)}"
            raise refuse(f"tools[{index}].{body.type}.name", text)
        else:
            tools_by_name[tool.name] = tool
    log_unsupported(Handling.LEFT_OUT, "tools", left_out)
    tools, names = list(tools_by_name.values()), tools_by_name.keys()
    check_tools(tools)
    mode = choice.get("type") if isinstance(choice, dict) else choice
    choice = MODES.get(str(mode), choice)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "tool_choice needs tools")
        return ToolUse((), "none") if choice == "none" else None
    allows_parallel = parallel is not False
    if choice is None or choice == "auto":
        return ToolUse(tools, "auto", parallel=allows_parallel)
    if choice == "none":
        return ToolUse(tools, "none", parallel=allows_parallel)
    if choice == "required":
        return ToolUse(tools, "required", parallel=allows_parallel)
    if not isinstance(choice, dict) or not isinstance(mode, str):
        text = "tool_choice must be none, auto, required, or an object with a type"
        raise refuse("tool_choice", text)
    check_served(TOOL_CHOICES, mode, "tool_choice")
    if mode == "allowed_tools":
        return _allowed(tools, choice, allows_parallel)
    return ToolUse(tools, "required", (_named(choice, names, "tool_choice"),), parallel=False)


def _allowed(tools: Sequence[Tool], choice: Mapping[str, Any], parallel: bool) -> ToolUse:
    config = choice.get("allowed_tools", choice)
    path = "tool_choice.allowed_tools"
    if not isinstance(config, dict):
        raise refuse(path, f"{path} must be an object")
    mode, allowed = config.get("mode", "auto"), config.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{path}.mode", f"{path}.mode must be auto or required")
    if not isinstance(allowed, list) or not 1 <= len(allowed) <= MAX_TOOLS:
        raise refuse(f"{path}.tools", f"{path}.tools must be a list of 1 to {MAX_TOOLS} tools")
    names = {tool.name for tool in tools}
    chosen_names = [
        _named(tool, names, f"{path}.tools[{index}]")
        for index, tool in enumerate(allowed)
        if not _is_left_out(tool)
    ]
    if not chosen_names and mode == "auto":
        return ToolUse(tools, "none", parallel=parallel)
    if not chosen_names:
        raise refuse(f"{path}.tools", f"{path}.tools has no tool that this server supports")
    required: Literal["auto", "required"] = "required" if mode == "required" else "auto"
    return ToolUse(tools, required, tuple(dict.fromkeys(chosen_names)), parallel=parallel)


def _is_left_out(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and TOOLS.get(kind, OMITTED_TYPE).fate is Handling.LEFT_OUT


def _named(value: Any, names: Collection[str], path: str) -> str:
    """Return the name of a tool in {"function": {"name"}}, {"custom": {"name"}} or {"name"}. Raises
    ServiceError."""
    kind = "custom" if isinstance(value, dict) and value.get("type") == "custom" else "function"
    function = value.get(kind, value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(path, f"{path} must name a function")
    if name not in names:
        raise refuse(f"{path}.function.name", f"{path}: no tool has the name {quoted(name)}")
    return name
