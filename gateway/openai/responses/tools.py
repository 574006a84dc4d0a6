"""The tools of /v1/responses: which tools are offered to the model, and which of them it may or
must call. Also the tables of how each type of item, content part and tool is handled."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import Field

from pdserve.gateway.http.fields import (
    DROPPED_TYPE,
    OMITTED_TYPE,
    REFUSED_TYPE,
    SERVED_TYPE,
    EntryTypes,
    Handling,
    kept_as_text,
)
from pdserve.gateway.http.validation import (
    MAX_TOOLS,
    StrictModel,
    ToolDescription,
    ToolName,
    check_served,
    check_tools,
    parsed,
)
from pdserve.gateway.openai.request_models import MODES, CustomBody, FunctionBody
from pdserve.gateway.sampling import refuse
from pdserve.services.common.errors import quoted
from pdserve.text import Tool, ToolUse

ROLES: EntryTypes = dict.fromkeys(("user", "assistant", "system", "developer"), SERVED_TYPE)
# A part whose type is not listed is dropped from a message of the assistant, and refused elsewhere.
PARTS: EntryTypes = {
    **dict.fromkeys(
        ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"),
        SERVED_TYPE,
    ),
    "encrypted_content": DROPPED_TYPE,
    **dict.fromkeys(("input_image", "input_file", "input_audio"), REFUSED_TYPE),
}
ITEMS: EntryTypes = {
    **dict.fromkeys(
        (
            "message", "function_call", "function_call_output", "custom_tool_call",
            "custom_tool_call_output", "reasoning", "item_reference", "additional_tools",
            "tool_search_output", "configuration_update",
        ),
        SERVED_TYPE,
    ),
    "file_search_call": kept_as_text("queries", "results"),
    "web_search_call": kept_as_text("action"),
    "code_interpreter_call": kept_as_text("code", "outputs"),
    "image_generation_call": kept_as_text("revised_prompt"),
    "tool_search_call": kept_as_text("arguments"),
    "computer_call": kept_as_text("action", "actions"),
    "computer_call_output": kept_as_text("output", of_client=True),
    "local_shell_call": kept_as_text("action"),
    "local_shell_call_output": kept_as_text("output", of_client=True),
    "shell_call": kept_as_text("action"),
    "shell_call_output": kept_as_text("output", of_client=True),
    "apply_patch_call": kept_as_text("operation"),
    "apply_patch_call_output": kept_as_text("status", "output", of_client=True),
    "mcp_call": kept_as_text("server_label", "name", "arguments", "output", "error"),
    "mcp_approval_request": kept_as_text("server_label", "name", "arguments"),
    "mcp_approval_response": kept_as_text("approve", "reason", of_client=True),
    "program": kept_as_text("code"),
    "program_output": kept_as_text("result"),
    "agent_message": kept_as_text("author", "content", of_client=True),  # from Codex
    "mcp_list_tools": DROPPED_TYPE,
    "compaction": DROPPED_TYPE,  # encrypted
    "context_compaction": DROPPED_TYPE,
    "compaction_trigger": REFUSED_TYPE,
}  # fmt: skip
UNKNOWN_ITEM = kept_as_text(
    "content", "text", "name", "arguments", "input", "action", "output", "result"
)
# A tool whose type is not listed belongs to the provider, and is left out.
TOOLS: EntryTypes = {
    "function": SERVED_TYPE,
    "custom": SERVED_TYPE,
    "namespace": SERVED_TYPE,
    **dict.fromkeys(
        (
            "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search",
            "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell",
            "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
            "web_search_preview_2025_03_11",
        ),
        OMITTED_TYPE,
    ),
}  # fmt: skip
# The modes may be objects that have only their type.
TOOL_CHOICES: EntryTypes = {
    **dict.fromkeys(
        ("none", "auto", "required", "function", "custom", "namespace", "allowed_tools"),
        SERVED_TYPE,
    ),
    **dict.fromkeys(
        (
            "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview",
            "file_search", "image_generation", "mcp", "programmatic_tool_calling", "shell",
            "web_search_preview", "web_search_preview_2025_03_11",
        ),
        REFUSED_TYPE,
    ),
}  # fmt: skip
UNIONS: dict[str, EntryTypes] = {
    "roles": ROLES,
    "content parts": PARTS,
    "input items": ITEMS,
    "tools": TOOLS,
    "tool choices": TOOL_CHOICES,
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that is offered to the model: `tool` is its definition with the name that the model
    uses; `name` and `namespace` are those that the client uses."""

    tool: Tool
    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request: by the name that the model uses, as the response object shows them,
    and the types of tools that are left out."""

    tools: Mapping[str, OfferedTool] = field(default_factory=dict)
    shown: Sequence[dict[str, Any]] = ()
    left_out: Sequence[str] = ()

    def with_more(self, lists: Sequence[Sequence[Mapping[str, Any]]]) -> "Offer":
        """Return a new Offer that also has the tools from input items; a tool whose name is already
        offered is skipped. Raises ServiceError for an invalid tool or too many tools."""
        tools = dict(self.tools)
        left_out = list(self.left_out)
        for tool_list in lists:
            added: dict[str, OfferedTool] = {}
            _add_tools(added, left_out, tool_list, "input: tools", offered=tools)
            tools |= added
            if len(tools) > MAX_TOOLS:
                break
        check_tools([offered.tool for offered in tools.values()])
        return Offer(tools, self.shown, left_out)

    def index(self) -> dict[tuple[Any, Any], list[str]]:
        """Return the names that the model uses for tools, by (namespace, name), by (None, name) and
        by (namespace, None)."""
        names: dict[tuple[Any, Any], list[str]] = {}
        sorted_tools = sorted(self.tools.items(), key=lambda item: item[1].namespace is not None)
        for key, tool in sorted_tools:
            for lookup_key in {
                (tool.namespace, tool.name),
                (None, tool.name),
                (tool.namespace, None),
            }:
                names.setdefault(lookup_key, []).append(key)
        return names


Index = Mapping[tuple[Any, Any], Sequence[str]]


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name that the model uses for a function: the namespace and the name joined by
    `__`, or the name if there is no namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


class FunctionTool(FunctionBody):
    """A function tool in the format of /v1/responses."""

    custom: ClassVar = False

    def shown(self) -> dict[str, Any]:
        extra = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "name": self.name,
            **extra,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class CustomTool(CustomBody):
    """A custom tool, whose input is a text, in the format of /v1/responses."""

    custom: ClassVar = True

    def shown(self) -> dict[str, Any]:
        return {"type": "custom", **self.model_dump(exclude_unset=True)}


class Namespace(StrictModel):
    """A group of tools under a common name, in the format of /v1/responses."""

    name: ToolName
    description: ToolDescription | None = None
    tools: list[dict[str, Any]] = Field(max_length=MAX_TOOLS)


class _Allowed(StrictModel):
    mode: str = Field("auto", pattern="^(auto|required)$")
    tools: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_TOOLS)


def parse_tools(values: Sequence[Mapping[str, Any]]) -> Offer:
    """Validate the field `tools` and return the Offer. Raises ServiceError for an invalid tool or a
    duplicate name."""
    tools: dict[str, OfferedTool] = {}
    left_out: list[str] = []
    shown = _add_tools(tools, left_out, values, "tools")
    check_tools([offered.tool for offered in tools.values()])
    return Offer(tools, shown, left_out)


def _add_tools(
    tools: dict[str, OfferedTool],
    left_out: list[str],
    values: Sequence[Mapping[str, Any]],
    list_path: str,
    offered: Container[str] = (),
    namespace: str | None = None,
) -> list[dict[str, Any]]:
    """Add each supported tool of a list to `tools`, unless its name is in `offered`, and the types
    of unsupported ones to `left_out`. `namespace` is the group that contains the list. Returns the
    added tools as a response shows them. Raises ServiceError."""
    shown: list[dict[str, Any]] = []
    for index, value in enumerate(values):
        path = f"{list_path}[{index}]"
        kind = _kind(value, path)
        if TOOLS.get(kind, OMITTED_TYPE).handling is Handling.LEFT_OUT:
            left_out.append(kind)
        elif kind == "namespace":
            if namespace is not None:
                raise refuse(
                    f"{path}.type", f"{path}.type: a namespace cannot contain another namespace"
                )
            group = parsed(Namespace, value, path)
            group_path = f"{path}.tools"
            added = _add_tools(tools, left_out, group.tools, group_path, offered, group.name)
            description = {} if group.description is None else {"description": group.description}
            shown.append({"type": "namespace", "name": group.name, **description, "tools": added})
        elif not _is_offered(value, offered, namespace):
            tool = _parsed_tool(value, kind, path)
            name = joined_name(namespace, tool.name)
            if name in tools:
                raise refuse(f"{path}.name", f"{path}.name: two tools have the name {quoted(name)}")
            model_tool = replace(tool.tool(path), name=name)
            tools[name] = OfferedTool(model_tool, tool.name, namespace, tool.custom)
            shown.append(tool.shown())
    return shown


def _is_offered(tool: Mapping[str, Any], offered: Container[str], namespace: str | None) -> bool:
    """Return whether the name of a tool that is not validated yet is in `offered`."""
    name = tool.get("name")
    return isinstance(name, str) and joined_name(namespace, name) in offered


def _parsed_tool(tool: Mapping[str, Any], kind: str, path: str) -> FunctionTool | CustomTool:
    """Validate a function or custom tool, in the format of /v1/responses or of a chat. Raises
    ServiceError."""
    if "name" not in tool and isinstance(tool.get(kind), Mapping):  # the form of a chat
        tool = tool[kind]
    return (
        parsed(FunctionTool, tool, path) if kind == "function" else parsed(CustomTool, tool, path)
    )


def _kind(tool: Mapping[str, Any], path: str) -> str:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise refuse(f"{path}.type", f"{path}.type must be a string")
    return kind


def tool_use(offer: Offer, choice: Any, parallel: bool) -> ToolUse | None:
    """Return which of the offered tools the model may or must call; None without tools. Raises
    ServiceError for an invalid tool_choice."""
    mode, names = _choice(choice, offer)
    if not offer.tools and mode == "required":
        raise refuse("tool_choice", "tool_choice needs tools")
    if not offer.tools:  # "none" forbids the tools of servers as well
        return ToolUse((), "none") if mode == "none" else None
    tools = [offered.tool for offered in offer.tools.values()]
    return ToolUse(tools, mode, names, parallel)  # type: ignore[arg-type]


def _choice(choice: Any, offer: Offer) -> tuple[str, tuple[str, ...]]:
    """Convert `tool_choice` to a mode (none, auto or required) and the names of the allowed tools;
    no names mean all tools. Raises ServiceError."""
    if choice is None:
        return "auto", ()
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if isinstance(kind, str) and kind in MODES:
        return MODES[kind], ()
    if not isinstance(choice, Mapping):
        modes = ", ".join(MODES)
        raise refuse("tool_choice", f"tool_choice must be one of {modes}, or an object")
    names_by_key = offer.index()
    if kind != "allowed_tools":
        return "required", tuple(_chosen(choice, names_by_key, "tool_choice"))
    allowed_tools = parsed(_Allowed, choice, "tool_choice")
    names: dict[str, None] = {}
    groups: set[str] = set()
    for index, tool in enumerate(allowed_tools.tools):
        kind = tool.get("type")
        if isinstance(kind, str) and TOOLS.get(kind, OMITTED_TYPE).handling is Handling.LEFT_OUT:
            continue  # such a tool is not offered either
        group = str(tool.get("name")) if kind == "namespace" else ""
        if group not in groups:
            names.update(dict.fromkeys(_chosen(tool, names_by_key, f"tool_choice.tools[{index}]")))
        if group:
            groups.add(group)
    if names:
        return allowed_tools.mode, tuple(names)
    if allowed_tools.mode == "required":
        raise refuse("tool_choice.tools", "tool_choice.tools has no tool that this server supports")
    return "none", ()


def _chosen(choice: Mapping[str, Any], names_by_key: Index, path: str) -> Sequence[str]:
    """Return the names of the tools that an object in tool_choice selects: one tool, or all of a
    namespace. Raises ServiceError if there is none."""
    kind = choice.get("type")
    if isinstance(nested := choice.get(str(kind)), Mapping):  # as in chat requests
        choice = {**choice, **nested}
    name, namespace = choice.get("name"), choice.get("namespace")
    check_served(TOOL_CHOICES, str(kind), path)
    if not isinstance(name, str):
        raise refuse(f"{path}.name", f"{path}.name must be a string")
    if not isinstance(namespace, str):
        namespace = None
    lookup_key = (name, None) if kind == "namespace" else (namespace, name)
    names = names_by_key.get(lookup_key, ())
    if not names:
        raise refuse("tool_choice", f"tool_choice: no tool has the name {quoted(name)}")
    return names if kind == "namespace" else names[:1]
