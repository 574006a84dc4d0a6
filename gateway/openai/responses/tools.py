"""The tools of /v1/responses: functions, and which of them an answer may or must call."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from pdserve.gateway.http.validation import (
    MAX_TOOLS,
    ArgumentSchema,
    StrictModel,
    ToolDescription,
    ToolName,
    first_error,
)
from pdserve.gateway.requests.tool_use import Tool, ToolUse
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import quoted

CHOICES = ("none", "auto", "required")


class ResponsesTool(StrictModel):
    """A function as this API declares it."""

    name: ToolName
    description: ToolDescription | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None

    def as_tool(self, index: int) -> Tool:
        """`index`: its place in `tools`."""
        param = f"tools[{index}].parameters"
        return Tool(self.name, self.description or "", self.parameters, bool(self.strict), param)

    def as_object(self) -> dict[str, Any]:
        return {"type": "function", **self.model_dump(), "strict": bool(self.strict)}


class _Allowed(StrictModel):
    mode: str = Field(pattern="^(auto|required)$")
    tools: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_TOOLS)


def parse_tools(given: Sequence[Mapping[str, Any]]) -> list[ResponsesTool]:
    """Raises ServiceError for a tool that is no function, or whose name another has."""
    tools: list[ResponsesTool] = []
    names: set[str] = set()
    for index, tool in enumerate(given):
        at = f"tools[{index}]"
        _check_function(tool, at)
        try:
            parsed = ResponsesTool.model_validate(tool)
        except ValidationError as error:
            raise first_error(error, at) from None
        if parsed.name in names:
            raise refuse(f"{at}.name", f"two tools have the name {quoted(parsed.name)}")
        names.add(parsed.name)
        tools.append(parsed)
    return tools


def tool_use(tools: Sequence[ResponsesTool], choice: Any, parallel: bool) -> ToolUse | None:
    """None without tools. Raises ServiceError for a choice that they do not allow."""
    mode, only = _choice(choice)
    if not tools and (only or mode == "required"):
        raise refuse("tool_choice", "tool_choice needs tools")
    known = {tool.name for tool in tools}
    for name in only:
        if name not in known:
            raise refuse("tool_choice", f"tool_choice: no tool has the name {quoted(name)}")
    if not tools:  # "none" forbids the tools of servers as well
        return ToolUse((), "none") if mode == "none" else None
    own = [tool.as_tool(index) for index, tool in enumerate(tools)]
    return ToolUse(own, mode, only, parallel)  # type: ignore[arg-type]


def _choice(choice: Any) -> tuple[str, tuple[str, ...]]:
    """Whether functions may or must be called, and which: empty for all."""
    if choice is None:
        return "auto", ()
    if not isinstance(choice, Mapping):
        if choice not in CHOICES:
            allowed = ", ".join(CHOICES)
            raise refuse("tool_choice", f"tool_choice must be one of {allowed}, or an object")
        return choice, ()
    if choice.get("type") != "allowed_tools":
        return "required", (_named(choice, "tool_choice"),)
    try:
        allowed_tools = _Allowed.model_validate(choice)
    except ValidationError as error:
        raise first_error(error, "tool_choice") from None
    names = [
        _named(tool, f"tool_choice.tools[{index}]")
        for index, tool in enumerate(allowed_tools.tools)
    ]
    return allowed_tools.mode, tuple(dict.fromkeys(names))


def _named(function: Mapping[str, Any], at: str) -> str:
    _check_function(function, at)
    name = function.get("name")
    if not isinstance(name, str):
        raise refuse(f"{at}.name", f"{at}.name must be a string")
    return name


def _check_function(tool: Mapping[str, Any], at: str) -> None:
    kind = tool.get("type")
    if kind != "function":
        text = f"{at}.type: {quoted(str(kind))} is not supported by this server, only 'function'"
        raise refuse(f"{at}.type", text)
