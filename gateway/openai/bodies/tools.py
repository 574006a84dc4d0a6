"""The fields of a chat that say which tools its model may call, and how."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from pdserve.gateway.http.validation import MAX_TOOLS, ArgumentSchema, ToolDescription
from pdserve.gateway.openai.bodies.body import Body
from pdserve.gateway.requests.tool_use import Tool, ToolUse
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import quoted


class FunctionBody(Body):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: ToolDescription | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    def tool(self, index: int) -> Tool:
        """`index`: its place in `tools`."""
        function = self.function
        return Tool(
            function.name,
            function.description or "",
            function.parameters,
            bool(function.strict),
            f"tools[{index}].function.parameters",
        )


def tool_use(bodies: Sequence[ToolBody], choice: Any, parallel: bool | None) -> ToolUse | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` ask for. Raises ServiceError."""
    tools = [body.tool(index) for index, body in enumerate(bodies)]
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            text = f"two tools have the name {quoted(name)}"
            raise refuse(f"tools[{index}].function.name", text)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "tool_choice needs tools")
        return ToolUse((), "none") if choice == "none" else None
    several = parallel is not False
    if choice is None or choice == "auto":
        return ToolUse(tools, "auto", parallel=several)
    if choice == "none":
        return ToolUse(tools, "none", parallel=several)
    if choice == "required":
        return ToolUse(tools, "required", parallel=several)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        only = _named(choice, names, "tool_choice")
        return ToolUse(tools, "required", (only,), parallel=False)
    if kind == "allowed_tools":
        return _allowed(tools, choice, several)
    raise refuse(
        "tool_choice",
        "tool_choice must be none, auto, required, or an object of type function or allowed_tools",
    )


def _allowed(tools: Sequence[Tool], choice: Mapping[str, Any], parallel: bool) -> ToolUse:
    given = choice.get("allowed_tools", choice)
    where = "tool_choice.allowed_tools"
    if not isinstance(given, dict):
        raise refuse(where, f"{where} must be an object")
    mode, allowed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{where}.mode", f"{where}.mode must be auto or required")
    if not isinstance(allowed, list) or not 1 <= len(allowed) <= MAX_TOOLS:
        raise refuse(f"{where}.tools", f"{where}.tools must be a list of 1 to {MAX_TOOLS} tools")
    names = [tool.name for tool in tools]
    only = [_named(tool, names, f"{where}.tools[{at}]") for at, tool in enumerate(allowed)]
    required: Literal["auto", "required"] = "required" if mode == "required" else "auto"
    return ToolUse(tools, required, tuple(dict.fromkeys(only)), parallel=parallel)


def _named(value: Any, names: Sequence[str], where: str) -> str:
    """The name of a tool, as {"function": {"name"}} or {"name"}. Raises ServiceError."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(where, f"{where} must name a function")
    if name not in names:
        raise refuse(f"{where}.function.name", f"{where}: no tool has the name {quoted(name)}")
    return name
