"""The fields of a chat that define which tools its model may or must call; and custom tools, whose
input is a text instead of JSON arguments.

The model sees a custom tool as a function with one string argument, `input`; the client gets only
that string. In a stream, the pieces of the input always add up to the same text, however the JSON
of the arguments is split.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, from_json, to_json

from pdserve.gateway.http.fields import OMITTED_TYPE, Handling, log_unsupported
from pdserve.gateway.http.validation import (
    MAX_TOOLS,
    ArgumentSchema,
    StrictModel,
    ToolDescription,
    ToolName,
    check_served,
    check_tools,
)
from pdserve.gateway.openai.request_models.base import TOOL_CHOICES, TOOLS, Body
from pdserve.gateway.sampling import client_errors, refuse
from pdserve.text import Tool, ToolUse, make_tool_use

INPUT = "input"
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_OPENING = 256  # characters before the text
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])")
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def _of_grammar(value: str | None, info: ValidationInfo) -> str | None:
    if not value and info.data.get("type") == "grammar":
        raise PydanticCustomError("missing", "is required")
    return value


class CustomFormat(StrictModel):
    """The format of a custom tool's input: any text, a regular expression, which is enforced, or a
    Lark grammar, which is only shown to the model."""

    type: Literal["text", "grammar"] = "text"
    syntax: Annotated[Literal["lark", "regex"] | None, AfterValidator(_of_grammar)] = Field(
        None, validate_default=True
    )
    definition: Annotated[str, AfterValidator(_of_grammar)] = Field(
        "", max_length=1 << 15, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """Accept the other forms of this object: the grammar nested in a field `grammar`, as in
        chat requests, or without a type."""
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("grammar"), dict):
            value = {**value, **value["grammar"]}
        if value.get("type") is None and value.keys() & {"syntax", "definition"}:
            value = {**value, "type": "grammar"}
        return value


def custom_tool(name: str, description: str, format_: CustomFormat | None, param: str = "") -> Tool:
    """Return the function that the model sees in place of a custom tool. `format_` is the format of
    its input; `param` is the place of that field in the request, for errors."""
    value: dict[str, Any] = {"type": "string"}
    strict, schema_path = False, ""
    if format_ is not None and format_.type == "grammar":
        if format_.syntax == "regex":
            value["pattern"] = f"^(?:{format_.definition})$"
            strict, schema_path = True, f"{param}.definition"
        else:
            description = f"{description}\n\nThe input matches this Lark grammar:\n"
            description = (description + format_.definition).strip()
    parameters = {
        "type": "object",
        "properties": {INPUT: value},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Tool(name, description, parameters, strict, param, schema_path)


def custom_arguments(text: str) -> str:
    """Return the JSON arguments of a custom tool's function for the input `text`."""
    return to_json({INPUT: text}).decode()


def written(value: Any) -> str:
    """Return the input, or the arguments, of an earlier tool call as text; values other than text
    become JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value).decode()


class CustomInput:
    """Extracts the input of a custom tool from the streamed JSON arguments of the function that
    stands in its place."""

    def __init__(self) -> None:
        self._raw = ""  # not read yet
        self._begun = self._ended = False
        self._other: list[str] | None = None  # arguments of another form

    def push(self, piece: str) -> str:
        """Add a piece of the arguments, and return the part of the input that it completes."""
        if self._ended:
            return ""
        if self._other is not None:
            self._other.append(piece)
            return ""
        self._raw += piece
        if not self._begun:
            opening = _OPENING.match(self._raw)
            if opening is None:
                if len(self._raw) > MAX_OPENING:
                    self._other, self._raw = [self._raw], ""
                return ""
            self._begun, self._raw = True, self._raw[opening.end() :]
        return self._read()

    def finish(self) -> str:
        """Return the input that `push` has not returned. This is empty unless the arguments do not
        begin with `{"input": "`: then it is their only string, or else the arguments unchanged."""
        if self._begun:
            return ""
        raw = "".join(self._other or [self._raw])
        value = _json_value(raw, "trailing-strings")
        if value == {}:
            return ""
        text = value.get(INPUT) if isinstance(value, Mapping) else None
        if text is None:
            complete = _json_value(raw, False)  # another field counts only if no more can follow
            if isinstance(complete, Mapping) and len(complete) == 1:
                (text,) = complete.values()
        return text if isinstance(text, str) else raw

    def _read(self) -> str:
        """Decode the received JSON string up to its end or to an incomplete escape, and return that
        text."""
        raw, position, texts = self._raw, 0, []
        while position < len(raw):
            if raw[position] == '"':
                self._ended = True
                break
            if plain := _PLAIN.match(raw, position):
                texts.append(plain[0])
                position = plain.end()
                continue
            escape = _ESCAPE.match(raw, position)
            if escape is None:
                if len(raw) - position < 6:
                    break
                texts.append(raw[position])  # not JSON: keep what the model has written
                position += 1
                continue
            text, end = _unescaped(escape[0]), escape.end()
            if "\ud800" <= text <= "\udbff":  # the first surrogate of a pair
                rest = raw[end : end + 6]
                if len(rest) < 6 and rest[:2] == "\\u"[: len(rest)]:
                    break
                second = _ESCAPE.fullmatch(rest)
                low = _unescaped(rest) if second else ""
                if "\udc00" <= low <= "\udfff":
                    code = 0x10000 + ((ord(text) - 0xD800) << 10) + (ord(low) - 0xDC00)
                    text, end = chr(code), end + 6
            texts.append("\ufffd" if "\ud800" <= text <= "\udfff" else text)
            position = end
        self._raw = raw[position:]
        return "".join(texts)


def _json_value(raw: str, partial: Literal[False, "trailing-strings"]) -> Any:
    try:
        return from_json(raw, allow_partial=partial)
    except ValueError:
        return None


def _unescaped(escape: str) -> str:
    kind = escape[1]
    return chr(int(escape[2:], 16)) if kind == "u" else _ESCAPED.get(kind, kind)


Mode = Literal["auto", "none", "required"]
# Anthropic and Mistral call it "any".
MODES: dict[str, Mode] = {
    "none": "none", "auto": "auto", "required": "required", "any": "required",
}  # fmt: skip


class FunctionBody(Body):
    """The definition of a function that the model may call."""

    name: ToolName
    description: ToolDescription | None = None
    parameters: ArgumentSchema | None = None
    strict: bool | None = None

    def tool(self, path: str) -> Tool:
        """Convert the definition to a Tool; `path` is its place in the request, for errors."""
        description, param = self.description or "", f"{path}.parameters"
        return Tool(self.name, description, self.parameters, bool(self.strict), param)


class CustomBody(Body):
    """The definition of a custom tool, whose input is a text."""

    name: ToolName
    description: ToolDescription | None = None
    format: CustomFormat | None = None

    def tool(self, path: str) -> Tool:
        """Convert the definition to a Tool; `path` is its place in the request, for errors."""
        return custom_tool(self.name, self.description or "", self.format, f"{path}.format")


class ToolBody(Body):
    """An item of `tools`. Tools that a provider runs, instead of the client, are left out."""

    type: str
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        """Accept the format of /v1/responses, in which the fields of a tool are beside its type."""
        if _is_left_out(value):
            return {"type": value["type"]}
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in ("function", "custom") and kind not in value and "name" in value:
            return {"type": kind, kind: value}
        return value

    def tool(self, path: str) -> Tool | None:
        """Convert the item to a Tool; None if it is left out. `path` is its place in the request.
        Raises ServiceError for a missing definition."""
        if TOOLS.get(self.type, OMITTED_TYPE).handling is Handling.LEFT_OUT:
            return None
        body_path = f"{path}.{self.type}"
        body = self.custom if self.type == "custom" else self.function
        if body is None:
            raise refuse(body_path, f"{body_path} is required")
        return body.tool(body_path)


def tool_use(bodies: Sequence[ToolBody], choice: Any, parallel: bool | None) -> ToolUse | None:
    """Combine the fields `tools`, `tool_choice` and `parallel_tool_calls` to the ToolUse of a
    request; None if the model may call no tool and none is defined. Raises ServiceError for invalid
    tools or an invalid choice."""
    tools: dict[str, Tool] = {}  # by path in the request
    left_out = []
    for index, body in enumerate(bodies):
        tool = body.tool(f"tools[{index}]")
        if tool is None:
            left_out.append(body.type)
        else:
            tools[f"tools[{index}].{body.type}"] = tool
    log_unsupported(Handling.LEFT_OUT, "tools", left_out)
    check_tools(list(tools.values()))
    mode, names = _choice(choice)
    allows_parallel = parallel is not False and "tool_choice" not in names
    with client_errors():
        return make_tool_use(tools, mode, names, parallel=allows_parallel)


def _choice(choice: Any) -> tuple[Mode, dict[str, str]]:
    """Return the mode of `tool_choice`, and the names of tools that may be called, by their path in
    it; empty: all. Raises ServiceError."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if choice is None:
        return "auto", {}
    if isinstance(kind, str) and kind in MODES:
        return MODES[kind], {}
    if not isinstance(choice, dict) or not isinstance(kind, str):
        text = "tool_choice must be none, auto, required, or an object with a type"
        raise refuse("tool_choice", text)
    check_served(TOOL_CHOICES, kind, "tool_choice")
    if kind == "allowed_tools":
        return _allowed(choice)
    return "required", {"tool_choice": _name(choice, "tool_choice")}


def _allowed(choice: Mapping[str, Any]) -> tuple[Mode, dict[str, str]]:
    config = choice.get("allowed_tools", choice)
    path = "tool_choice.allowed_tools"
    if not isinstance(config, dict):
        raise refuse(path, f"{path} must be an object")
    mode, allowed = config.get("mode", "auto"), config.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{path}.mode", f"{path}.mode must be auto or required")
    if not isinstance(allowed, list) or not 1 <= len(allowed) <= MAX_TOOLS:
        raise refuse(f"{path}.tools", f"{path}.tools must be a list of 1 to {MAX_TOOLS} tools")
    paths = {f"{path}.tools[{index}]": tool for index, tool in enumerate(allowed)}
    names = {path: _name(tool, path) for path, tool in paths.items() if not _is_left_out(tool)}
    if not names and mode == "auto":
        return "none", {}
    if not names:
        raise refuse(f"{path}.tools", f"{path}.tools has no tool that this server supports")
    return MODES[mode], names


def _is_left_out(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and TOOLS.get(kind, OMITTED_TYPE).handling is Handling.LEFT_OUT


def _name(value: Any, path: str) -> str:
    """Return the tool name in an object of the form {"function": {"name"}}, {"custom": {"name"}} or
    {"name"}. Raises ServiceError if it is missing."""
    kind = "custom" if isinstance(value, dict) and value.get("type") == "custom" else "function"
    function = value.get(kind, value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(path, f"{path} must contain the name of a tool")
    return name
