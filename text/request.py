"""What a client requests, the same for every API: prompt, sampling, structure of the text, tools;
pure data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pdserve.engine.api import (
    MAX_STRUCTURE_CHARS,
    MAX_STRUCTURE_DEPTH,
    MAX_STRUCTURE_VALUES,
    ClientParams,
)
from pdserve.text.errors import TextError
from pdserve.text.messages import TemplateInput

MAX_SHOWN_NAME = 200  # characters of an unknown tool's name that an error shows

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A form of text; `param` is the request's field that sets it.

    `value` by kind: json_schema, a schema (an object, or true); json_object, nothing; regex, its
    text; choice, a list of texts; lark, a grammar as llguidance reads it; grammar, one of Lark or
    of GBNF, as llama.cpp and XGrammar read it; structural_tag, free text with tags: {"structures":
    [{"begin", "schema", "end"}], "triggers": [texts], "required": bool, "stop_after_first": bool},
    where `required` allows only tags, at least one, white space between them, and a few characters
    behind. A structure there may have a "param" or a "path" and be "lenient" itself; if it
    "is_hidden", the client did not write its schema, so errors name no path within it. With "or",
    the fields of another structure, the text may match that one instead of having tags.

    `path`: of the schema in the request, if that is not `param`.

    `lead`: what the answer has before the form, including special tokens.

    `lenient`: of a schema, keywords that cannot be enforced bind nothing; otherwise they are
    refused. `whitespace`: JSON may have some between its tokens.
    """

    kind: Kind
    value: Any
    param: str
    lenient: bool = False
    whitespace: bool = True
    lead: str = ""
    path: str = ""

    def encoded(self) -> bytes:
        """Return the structure for the tokenizer workers; equal structures have equal bytes."""
        return json.dumps({item.name: getattr(self, item.name) for item in fields(self)}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> "Structure":
        return cls(**json.loads(data))


def oversize(structure: Structure) -> str:
    """Return why a structure is too large to compile; empty if it is not. Takes about a millisecond
    at most, however large it is."""
    level: list[Any] = [[structure.value]]
    chars = num_values = 0
    for _ in range(MAX_STRUCTURE_DEPTH):
        inner: list[Any] = []
        for item in level:
            num_values += len(item)
            if num_values > MAX_STRUCTURE_VALUES:
                return f"it has more than {MAX_STRUCTURE_VALUES} values"
            values: Iterable[Any] = item
            if isinstance(item, dict):
                chars += sum(map(len, item))
                values = item.values()
            for value in values:
                if isinstance(value, str):
                    chars += len(value)
                elif isinstance(value, int):
                    chars += value.bit_length() // 3
                elif isinstance(value, dict | list):
                    inner.append(value)
        if chars > MAX_STRUCTURE_CHARS:
            return f"its texts have more than {MAX_STRUCTURE_CHARS} characters"
        if not inner:
            return ""
        level = inner
    return f"it is nested more than {MAX_STRUCTURE_DEPTH} levels deep"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSampling(ClientParams):
    """Sampling as the client wrote it; None takes the model's default."""

    repetition_penalty_field: str = "repetition_penalty"
    max_tokens_field: str = "max_tokens"
    logprobs_field: str = "logprobs"
    stop: Sequence[str] = ()
    best_of: int | None = None  # None: n
    seed: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    bad_words: Sequence[str] = ()
    structure: Structure | None = None
    structure_after: str = ""  # the structure binds what follows it; empty: all of the answer
    thinking_budget: int | None = None  # tokens of thinking; None: no bound
    thinking_budget_field: str = "thinking_token_budget"
    # None: the model's own. If the first is empty, the answer begins within reasoning.
    thinking_tags: tuple[str, str] | None = None

    def written_as(self, param: str) -> str:
        """Return the client's name for a parameter of the engine."""
        structure = self.structure.param if self.structure else param
        return {
            "max_tokens": self.max_tokens_field,
            "logprobs": self.logprobs_field,
            "repetition_penalty": self.repetition_penalty_field,
            "grammar": structure,
            "thinking": self.thinking_budget_field,
        }.get(param, param)

    @property
    def is_constrained(self) -> bool:
        """Return whether the answer has constraints besides its sampling (text/constraints.py)."""
        return bool(self.structure or self.bad_words or self.thinking_budget is not None)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call at the client."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  # JSON schema of its arguments; None: an object
    strict: bool = False  # force arguments to match the schema
    param: str = ""  # the request's field that `parameters` come from; empty: none
    place: str = ""  # what to name for a fault in `parameters` that the client did not write

    def as_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are shown to the model, which may call all of them or `only` some."""

    tools: Sequence[Tool]
    choice: Literal["auto", "none", "required"] = "auto"
    only: Sequence[str] = ()  # names of those that may be called; empty: all
    parallel: bool = True  # several calls in one answer


def make_tool_use(
    tools: Mapping[str, Tool],
    choice: Literal["auto", "none", "required"],
    only: Mapping[str, str] | None = None,
    *,
    parallel: bool = True,
) -> ToolUse | None:
    """Return the use of a request's tools; None without tools, unless `choice` is "none".

    `tools`: by path in the request ("tools[0].function"). `only`: the names of tools that
    tool_choice allows, by path; empty: all. Raises TextError for two tools with one name, a choice
    that needs a tool where there is none, and an unknown name.
    """
    names: set[str] = set()
    for path, tool in tools.items():
        if tool.name in names:
            raise TextError(f"two tools have the name {tool.name!r}", f"{path}.name")
        names.add(tool.name)
    if not tools:
        if choice == "required" or only:
            raise TextError("tool_choice needs tools", "tool_choice")
        return ToolUse((), "none") if choice == "none" else None
    for path, name in (only or {}).items():
        if name not in names:
            shown = name if len(name) <= MAX_SHOWN_NAME else f"{name[:MAX_SHOWN_NAME]}..."
            raise TextError(f"{path}: no tool has the name {shown!r}", f"{path}.function.name")
    chosen = tuple(dict.fromkeys((only or {}).values()))
    return ToolUse(list(tools.values()), choice, chosen, parallel)


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """A chat completion as a client requests it."""

    model: str
    conversation: TemplateInput
    sampling: RequestedSampling
    cache_salt: bytes = b""
    priority: int = 0  # lower is earlier
    kept_tokens: int | None = None  # of the prompt, from its end; -1: what fits; None: all
    tool_use: ToolUse | None = None
    separate_reasoning: bool = True  # False: reasoning is part of the answer's text
    max_tool_calls: int | None = None  # carried out by the gateway; None: any number

    @property
    def prompt_field(self) -> str:
        """Return the name of the messages in the request."""
        return self.conversation.messages_field

    @property
    def continues(self) -> bool:
        """Return whether the answer continues the prompt's text."""
        return self.conversation.continue_final_message


@dataclass(frozen=True, slots=True)
class TextCompletionRequest:
    """A plain completion of texts or token ids, as a client requests it."""

    model: str
    prompts: Sequence[str | Sequence[int]]
    sampling: RequestedSampling
    prompt_field: str = "prompt"  # name of the field in the request
    echo: bool = False
    echo_only: bool = False
    add_special_tokens: bool = True
    cache_salt: bytes = b""
    priority: int = 0  # lower is earlier
    kept_tokens: int | None = None  # of each prompt, from its end; -1: what fits; None: all

    @property
    def continues(self) -> bool:
        """Return whether the answer continues the prompt's text."""
        return True
