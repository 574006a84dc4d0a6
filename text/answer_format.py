"""How one answer is read: the parsers of its reasoning and calls, and its tool constraints.

The parser families come from the model's chat template, or from the options tool_parser and
reasoning_parser.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from pdserve.engine.api import MAX_STRUCTURE_VALUES
from pdserve.text.errors import TextError
from pdserve.text.parsing import (
    AnswerParser,
    CallStream,
    ContentParser,
    InlineReasoning,
    ReasoningFamily,
    ToolFamily,
    ToolSchemas,
    in_form_only,
)
from pdserve.text.reasoning import reasoning_family
from pdserve.text.request import RequestedSampling, Structure, ToolUse
from pdserve.text.structured_output import without_annotations
from pdserve.text.tokenizer import Vocabulary
from pdserve.text.tool_parsers import GENERIC_PARSER, tool_family

AUTO = "auto"
PROMPT_END_TOKENS = 16  # in which a template may open or close reasoning
ANY_OBJECT = {"type": "object"}

Families = tuple[ToolFamily | None, ReasoningFamily | None]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How an answer is read; by default the whole text is the answer.

    `only_calls`: drop text after a call. `calls_first`: an answer that does not begin with a call
    has none. `open`: the prompt has opened reasoning. `inline`: reasoning is part of the text.
    `continues`: the answer continues a message. `constrained_from`: from where on a grammar holds
    calls to a form, so that only that form is read: the "start" or the end of the "thought"; empty:
    nowhere.
    """

    tools: ToolFamily | None = None
    reasoning: ReasoningFamily | None = None
    schemas: ToolSchemas = field(default_factory=ToolSchemas)
    parallel: bool = True
    only_calls: bool = False
    calls_first: bool = False
    open: bool = False
    inline: bool = False
    continues: bool = False
    constrained_from: Literal["", "start", "thought"] = ""

    @property
    def special(self) -> frozenset[str]:
        """Return the texts that the parsers need even where they are special tokens."""
        families = (self.tools, self.reasoning)
        return frozenset(text for family in families if family for text in family.special)

    def parser(self) -> ContentParser | None:
        """Return a new parser for one choice, None if the text is the content as it is."""
        parser: ContentParser
        new_id = partial(new_call_id, self.tools.id_len if self.tools else 0)
        if self.tools is not None and self.tools.make_parser is not None:
            parser = self.tools.make_parser(new_id, self.parallel, self.schemas)
        elif self.tools is None and self.reasoning is None:
            return None
        else:
            thoughts = self.reasoning.make(self.open) if self.reasoning else None
            calls: ContentParser | None = None
            in_thought = after_thought = None
            answer_tags = self.reasoning.answer_tags if self.reasoning else ()
            if self.tools is not None or answer_tags:

                def stream(tools: ToolFamily | None) -> CallStream:
                    return CallStream(
                        tools,
                        self.schemas,
                        new_id,
                        self.parallel,
                        self.only_calls,
                        self.calls_first,
                        answer_tags,
                    )

                in_form = in_form_only(self.tools) if self.tools and self.constrained_from else None
                calls = stream(in_form if self.constrained_from == "start" else self.tools)
                after_thought = (
                    partial(stream, in_form) if self.constrained_from == "thought" else None
                )
            if self.tools is not None and self.tools.openers and thoughts is not None:
                tagged = replace(self.tools, bare="", answer_tags=())
                in_thought = partial(CallStream, tagged, self.schemas, str, parallel=True)
            parser = AnswerParser(thoughts, calls, in_thought, after_thought, opened=self.open)
        family = self.tools if self.tools is not None and self.tools.make_parser else self.reasoning
        if self.continues and family is not None and family.opening:
            parser.push(family.opening)
        if self.inline and self.reasoning is not None:
            return InlineReasoning(parser, self.reasoning.begin, self.reasoning.end)
        return parser


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """The options tool_parser and reasoning_parser, which apply to every model: the name of a
    parser, "none" for no parsing, or "auto" for the parser that the chat template implies."""

    tools: str = AUTO
    reasoning: str = AUTO

    @property
    def reads_calls(self) -> bool:
        """Return whether tool calls are parsed from answers."""
        return self.tools != "none"

    def families(self, tool_parser: str, reasoning_parser: str) -> Families:
        """Return the families for a model; the arguments name those of its template and are empty
        if it has none. For a template without a tool family, "auto" is the generic family, whose
        calls the prompt explains."""
        tools = (tool_parser or GENERIC_PARSER) if self.tools == AUTO else self.tools
        reasoning = reasoning_parser if self.reasoning == AUTO else self.reasoning
        return tool_family(tools), reasoning_family(reasoning)


def prompt_end(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Return the end of a prompt's text, with special tokens. Takes a fraction of a millisecond."""
    text = vocabulary.incremental(skip_special_tokens=False, continues=True)
    return text.push(ids[-PROMPT_END_TOKENS:]) + text.flush()


def answer_format(
    families: Families,
    use: ToolUse | None,
    prompt_end: str,
    *,
    continues: bool,
    inline: bool,
    structured: bool = False,
) -> AnswerFormat:
    """Return how an answer is read. `prompt_end`: the last text before the answer; with
    `continues`, all of the message that the answer continues. `structured`: text without calls has
    a structure.
    """
    tools, reasoning = families
    callable_tools = use.tools if use is not None and _may_call(use) else ()
    constrained_from: Literal["", "start", "thought"] = ""
    if tools is not None and callable_tools and _is_bound(use, tools, prompt_end):
        thinks = reasoning is not None and _thinks_first(reasoning, prompt_end, continues)
        constrained_from = "thought" if thinks else "start"
    return AnswerFormat(
        tools if callable_tools else None,
        reasoning,
        ToolSchemas({tool.name: tool.parameters for tool in callable_tools}),
        use.parallel if use else True,
        only_calls=use is not None and (structured or use.choice == "required"),
        calls_first=structured,
        open=reasoning is not None and _is_open(reasoning, prompt_end, continues),
        inline=inline,
        continues=continues,
        constrained_from=constrained_from,
    )


def with_structure(
    sampling: RequestedSampling,
    families: Families,
    use: ToolUse | None,
    prompt_end: str,
    *,
    continues: bool,
) -> RequestedSampling:
    """Return the sampling with the tags of the model's reasoning, the structure that the tools
    require, and what an answer has before its structure; `prompt_end` and `continues` as for
    `answer_format`. Raises TextError for two structures, and for a structure without room for calls
    that the model may make."""
    tools, reasoning = families
    sampling = thinking_bound(sampling, reasoning)
    structure = tool_structure(tools, use) if use is not None else None
    if sampling.structure is not None:
        structure = _beside_calls(sampling.structure, structure, families, use)
    if structure is None:
        return sampling
    if structure is not sampling.structure and tools is not None and tools.make_parser is not None:
        # A Harmony call is a separate message, not part of the final one.
        return replace(sampling, structure=structure, structure_after="")
    after = ""
    if reasoning is not None and _thinks_first(reasoning, prompt_end, continues):
        after = reasoning.after
        structure = replace(structure, lead=reasoning.lead)
    return replace(sampling, structure=structure, structure_after=after)


def thinking_bound(
    sampling: RequestedSampling, reasoning: ReasoningFamily | None
) -> RequestedSampling:
    """Return the sampling with the tags of the model's reasoning if reasoning is bounded. Raises
    TextError if the model has no reasoning to bound."""
    if sampling.thinking_budget is None or sampling.thinking_tags is not None:
        return sampling
    if reasoning is None:
        param = sampling.thinking_budget_field
        text = f"{param}: reasoning of this model is not parsed (see reasoning_parser)"
        raise TextError(text, param)
    return replace(sampling, thinking_tags=reasoning.written or (reasoning.begin, reasoning.end))


def _beside_calls(
    requested: Structure, required: Structure | None, families: Families, use: ToolUse | None
) -> Structure:
    """Return a client's structure that also allows the calls that the model may make; `required`
    is the structure that the tools require. Raises TextError if they cannot be combined."""
    tools, reasoning = families
    if use is None or not _may_call(use) or tools is None:
        return requested
    if use.choice == "auto" and tools.has_tags and requested.kind != "structural_tag":
        other = {item.name: getattr(requested, item.name) for item in fields(requested)}
        value = {**_tags(tools, use), "required": True, "or": other}
        return Structure("structural_tag", value, requested.param)
    if required is None and tools.make_parser is not None and reasoning is not None:
        return requested  # it binds one message, and calls are other messages
    if required is not None:
        text = f"{requested.param} cannot be combined with the form that {required.param} requires"
        raise TextError(text, requested.param)
    text = f"{requested.param} cannot be combined with tools that the model may call"
    raise TextError(f'{text}; set tool_choice to "none"', requested.param)


def tool_structure(family: ToolFamily | None, use: ToolUse) -> Structure | None:
    """Return the structure that holds an answer to the required calls, None if the model may write
    anything. Raises TextError for a model whose calls are not parsed."""
    if not _may_call(use) or not _is_constrained(use):
        return None
    param = "tool_choice" if use.choice == "required" or use.only else "tools"
    if family is None:
        raise TextError(
            f"{param}: tool calls of this model are not parsed (see tool_parser)", param
        )
    return Structure("structural_tag", _tags(family, use), param)


def _tags(family: ToolFamily, use: ToolUse) -> dict[str, Any]:
    """Return the value of a structural tag whose tags are the calls of the tools."""
    required = use.choice == "required"
    tools = [tool for tool in use.tools if not use.only or tool.name in use.only]
    schemas = without_annotations(
        [
            _object_schema(tool.parameters) if required or tool.strict else ANY_OBJECT
            for tool in tools
        ],
        MAX_STRUCTURE_VALUES,
    )
    structures = [
        {
            "begin": family.form.begin.replace("NAME", tool.name),
            "schema": schema,
            "end": family.form.end,
            "lenient": not tool.strict,
            **({"param": tool.place or tool.param} if tool.place or tool.param else {}),
            **({"is_hidden": True} if tool.place else {}),
        }
        for tool, schema in zip(tools, schemas, strict=True)
    ]
    return {
        "structures": structures,
        "triggers": [family.form.trigger],
        "required": required,
        "stop_after_first": not use.parallel,
    }


def _object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments, which are always an object."""
    schema = dict(parameters or {})
    return schema if "$ref" in schema else {**schema, **ANY_OBJECT}


def new_call_id(length: int = 0) -> str:
    """Return a call id in OpenAI's form, or of `length` letters and digits."""
    return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


def _may_call(use: ToolUse | None) -> bool:
    return use is not None and bool(use.tools) and use.choice != "none"


def _is_constrained(use: ToolUse) -> bool:
    """Return whether a grammar holds the calls to a form."""
    return use.choice == "required" or bool(use.only) or any(tool.strict for tool in use.tools)


def _is_bound(use: ToolUse | None, tools: ToolFamily, prompt_end: str) -> bool:
    """Return whether only calls in the grammar's form may be read from free text. A prompt that
    ends with the trigger has begun a call, which the grammar does not see."""
    if use is None or use.choice != "auto" or tools.make_parser is not None:
        return False
    return _is_constrained(use) and not prompt_end.endswith(tools.form.trigger)


def _thinks_first(reasoning: ReasoningFamily, text: str, continues: bool) -> bool:
    """Return whether reasoning precedes the answer's text; a continued message has had it."""
    if continues:
        return _is_open(reasoning, text, continues)
    return not text.rstrip().endswith(reasoning.after + reasoning.lead)


def _is_open(reasoning: ReasoningFamily, text: str, continues: bool) -> bool:
    """Return whether a text leaves reasoning open. A template's text before an answer ends with the
    tag; a user may have quoted the tag earlier."""
    if continues:
        return text.rfind(reasoning.begin) > text.rfind(reasoning.end)
    return text.rstrip().endswith(reasoning.begin)
