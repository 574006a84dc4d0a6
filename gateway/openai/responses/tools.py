"""The tools of /v1/responses: which are offered, and which of them an answer may or must call."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from pdserve.gateway.http.validation import (
    MAX_TOOLS,
    ArgumentSchema,
    StrictModel,
    ToolDescription,
    ToolName,
    check_tools,
    first_error,
)
from pdserve.gateway.openai.custom_input import CustomFormat, custom_tool
from pdserve.gateway.openai.responses.members import TOOL_CHOICES, TOOLS
from pdserve.gateway.requests.members import LEFT_OUT, REFUSED, Fate
from pdserve.gateway.requests.tool_use import Tool, ToolUse
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import quoted

MODES = ("none", "auto", "required")
M = TypeVar("M", bound=StrictModel)


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A `tool` as the model sees it; its `name` and `namespace` as the client knows them."""

    tool: Tool
    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request by the names that the model knows, as the response shows them, and the
    types of those that are left out."""

    tools: Mapping[str, OfferedTool] = field(default_factory=dict)
    shown: Sequence[dict[str, Any]] = ()
    left_out: Sequence[str] = ()

    def with_more(self, lists: Sequence[Sequence[Mapping[str, Any]]]) -> "Offer":
        """Return the offer with those tools of items whose names are new. Raises ServiceError."""
        tools = dict(self.tools)
        left_out = list(self.left_out)
        for more in lists:
            added: dict[str, OfferedTool] = {}
            _add_tools(added, left_out, more, "input: tools", offered=tools)
            tools |= added
            if len(tools) > MAX_TOOLS:
                break
        check_tools([one.tool for one in tools.values()])
        return Offer(tools, self.shown, left_out)

    def index(self) -> dict[tuple[Any, Any], list[str]]:
        """Return the models' names of tools by namespace and name, by name only, and by namespace
        only."""
        made: dict[tuple[Any, Any], list[str]] = {}
        plain_first = sorted(self.tools.items(), key=lambda item: item[1].namespace is not None)
        for key, one in plain_first:
            for words in {(one.namespace, one.name), (None, one.name), (one.namespace, None)}:
                made.setdefault(words, []).append(key)
        return made


Index = Mapping[tuple[Any, Any], Sequence[str]]


def joined_name(namespace: str | None, name: str) -> str:
    """Return a function's name as the model sees it."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


class FunctionTool(StrictModel):
    """A function as this API declares it."""

    name: ToolName
    description: ToolDescription | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None

    def offered(self, at: str) -> OfferedTool:
        """Return the tool as it is offered; `at` is its place in the request."""
        param = f"{at}.parameters"
        about = self.description or ""
        return OfferedTool(
            Tool(self.name, about, self.parameters, bool(self.strict), param), self.name
        )

    def shown(self) -> dict[str, Any]:
        more = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "name": self.name,
            **more,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class CustomTool(StrictModel):
    """A tool whose input is a text."""

    name: ToolName
    description: ToolDescription | None = None
    format: CustomFormat | None = None

    def offered(self, at: str) -> OfferedTool:
        tool = custom_tool(self.name, self.description or "", self.format, f"{at}.format")
        return OfferedTool(tool, self.name, custom=True)

    def shown(self) -> dict[str, Any]:
        return {"type": "custom", **self.model_dump(exclude_unset=True)}


class Namespace(StrictModel):
    """Tools under a name."""

    name: ToolName
    description: ToolDescription | None = None
    tools: list[dict[str, Any]] = Field(max_length=MAX_TOOLS)


class _Allowed(StrictModel):
    mode: str = Field("auto", pattern="^(auto|required)$")
    tools: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_TOOLS)


def parse_tools(given: Sequence[Mapping[str, Any]]) -> Offer:
    """Return the tools that can be served. Raises ServiceError for a wrong one, or a duplicate
    name."""
    tools: dict[str, OfferedTool] = {}
    left_out: list[str] = []
    shown = _add_tools(tools, left_out, given, "tools")
    check_tools([one.tool for one in tools.values()])
    return Offer(tools, shown, left_out)


def _add_tools(
    tools: dict[str, OfferedTool],
    left_out: list[str],
    given: Sequence[Mapping[str, Any]],
    at: str,
    offered: Container[str] = (),
) -> list[dict[str, Any]]:
    """Add tools that can be served and whose names are not `offered` to `tools`, and the types of
    others to `left_out`. Returns how a response shows them."""
    shown: list[dict[str, Any]] = []
    for index, tool in enumerate(given):
        here = f"{at}[{index}]"
        kind = _kind(tool, here)
        if TOOLS.get(kind, LEFT_OUT).fate is Fate.LEFT_OUT:
            left_out.append(kind)
        elif kind == "namespace":
            group = _parsed(Namespace, tool, here)
            members = []
            for place, member in enumerate(group.tools):
                within = f"{here}.tools[{place}]"
                if _is_offered(member, offered, group.name):
                    continue
                parsed = _parsed_tool(member, within)
                one = replace(parsed.offered(within), namespace=group.name)
                _add(tools, joined_name(group.name, one.name), one, within)
                members.append(parsed.shown())
            about = {} if group.description is None else {"description": group.description}
            shown.append({"type": "namespace", "name": group.name, **about, "tools": members})
        elif not _is_offered(tool, offered):
            parsed = _parsed_tool(tool, here)
            one = parsed.offered(here)
            _add(tools, one.name, one, here)
            shown.append(parsed.shown())
    return shown


def _is_offered(
    tool: Mapping[str, Any], offered: Container[str], namespace: str | None = None
) -> bool:
    """Return whether an unchecked tool has one of these names."""
    name = tool.get("name")
    return isinstance(name, str) and joined_name(namespace, name) in offered


def _parsed_tool(tool: Mapping[str, Any], at: str) -> FunctionTool | CustomTool:
    """Return a function or a custom tool."""
    kind = _kind(tool, at)
    if kind not in ("function", "custom"):
        what = "is not supported by this server, only 'function' and 'custom'"
        raise refuse(f"{at}.type", f"{at}.type: {quoted(kind)} {what}")
    if "name" not in tool and isinstance(tool.get(kind), Mapping):  # the form of a chat
        tool = tool[kind]
    if kind == "function":
        return _parsed(FunctionTool, tool, at)
    return _parsed(CustomTool, tool, at)


def _add(tools: dict[str, OfferedTool], name: str, one: OfferedTool, at: str) -> None:
    if name in tools:
        raise refuse(f"{at}.name", f"{at}.name: two tools have the name {quoted(name)}")
    tools[name] = replace(one, tool=replace(one.tool, name=name))


def _kind(tool: Mapping[str, Any], at: str) -> str:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise refuse(f"{at}.type", f"{at}.type must be a string")
    return kind


def _parsed(kind: type[M], value: Mapping[str, Any], at: str) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise first_error(error, at) from None


def tool_use(offer: Offer, choice: Any, parallel: bool) -> ToolUse | None:
    """Return the use of tools, None without. Raises ServiceError for a choice they do not allow."""
    mode, only = _choice(choice, offer)
    if not offer.tools and mode == "required":
        raise refuse("tool_choice", "tool_choice needs tools")
    if not offer.tools:  # "none" forbids the tools of servers as well
        return ToolUse((), "none") if mode == "none" else None
    tools = [one.tool for one in offer.tools.values()]
    return ToolUse(tools, mode, only, parallel)  # type: ignore[arg-type]


def _choice(choice: Any, offer: Offer) -> tuple[str, tuple[str, ...]]:
    """Return whether tools may or must be called, and which: empty for all."""
    if choice is None:
        return "auto", ()
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in MODES:
        return kind, ()
    if not isinstance(choice, Mapping):
        allowed = ", ".join(MODES)
        raise refuse("tool_choice", f"tool_choice must be one of {allowed}, or an object")
    index = offer.index()
    if kind != "allowed_tools":
        return "required", tuple(_chosen(choice, index, "tool_choice"))
    allowed_tools = _parsed(_Allowed, choice, "tool_choice")
    names: dict[str, None] = {}
    groups: set[str] = set()
    for place, tool in enumerate(allowed_tools.tools):
        kind = tool.get("type")
        if isinstance(kind, str) and TOOLS.get(kind, LEFT_OUT).fate is Fate.LEFT_OUT:
            continue  # such a tool is not offered either
        group = str(tool.get("name")) if kind == "namespace" else ""
        if group not in groups:
            names.update(dict.fromkeys(_chosen(tool, index, f"tool_choice.tools[{place}]")))
        if group:
            groups.add(group)
    if names:
        return allowed_tools.mode, tuple(names)
    if allowed_tools.mode == "required":
        raise refuse("tool_choice.tools", "tool_choice.tools has no tool that is offered here")
    return "none", ()


def _chosen(choice: Mapping[str, Any], index: Index, at: str) -> Sequence[str]:
    """Return the tools that an object of tool_choice names. Raises ServiceError."""
    kind, name, namespace = (choice.get(key) for key in ("type", "name", "namespace"))
    if TOOL_CHOICES.get(str(kind), REFUSED).fate is Fate.REFUSED:
        what = "is not supported by this server, only 'function' and 'custom'"
        raise refuse(f"{at}.type", f"{at}.type: {quoted(str(kind))} {what}")
    if not isinstance(name, str):
        raise refuse(f"{at}.name", f"{at}.name must be a string")
    words = (name, None) if kind == "namespace" else (_text(namespace), name)
    found = index.get(words, ())
    if not found:
        raise refuse("tool_choice", f"tool_choice: no tool has the name {quoted(name)}")
    return found if kind == "namespace" else found[:1]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
