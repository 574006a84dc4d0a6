"""The structures that bind an answer to its tools, and the parsers a gateway uses."""

import json
import random
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from builders.tool_answers import TOOL_ANSWERS
from fakes.router import FakeRouter, saying, served
from fakes.scripted_service import scripted_service
from oracles.grammar_walks import Walk, compiler

from pdserve.gateway.caller import Caller
from pdserve.services.common.errors import ServiceError
from pdserve.text import (
    AnswerFormat,
    ChatCompletionRequest,
    ParserChoice,
    RequestedSampling,
    Structure,
    TemplateInput,
    TextError,
    Tool,
    ToolUse,
    calls_of,
    text_of,
)
from pdserve.text.answer_format import answer_format, tool_structure, with_structure
from pdserve.text.reasoning import reasoning_family
from pdserve.text.request import oversize
from pdserve.text.tool_parsers import tool_family, tool_parser_names

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER, CLOCK = Tool("get_weather", "", SCHEMA), Tool("get_time")
STRICT = Tool("get_weather", "", SCHEMA, strict=True)
HERMES = tool_family("hermes")
NAMES = tool_parser_names()
THINK = reasoning_family("think")


def test_a_free_tool_choice_has_no_structure() -> None:
    assert tool_structure(HERMES, ToolUse([WEATHER, CLOCK])) is None
    assert tool_structure(HERMES, ToolUse([STRICT], "none")) is None
    assert tool_structure(None, ToolUse([WEATHER])) is None
    assert tool_structure(HERMES, ToolUse([], "required")) is None


def test_required_calls() -> None:
    structure = tool_structure(HERMES, ToolUse([WEATHER, CLOCK], "required"))
    assert structure == Structure(
        "structural_tag",
        {
            "structures": [
                {
                    "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
                    "schema": SCHEMA,
                    "end": "}\n</tool_call>",
                    "lenient": True,
                },
                {
                    "begin": '<tool_call>\n{"name": "get_time", "arguments": ',
                    "schema": {"type": "object"},
                    "end": "}\n</tool_call>",
                    "lenient": True,
                },
            ],
            "triggers": ["<tool_call>"],
            "required": True,
            "stop_after_first": False,
        },
        "tool_choice",
    )


def described(number: int) -> Tool:
    texts = {"title": "t" * 20, "description": "d" * 400, "examples": ["e"], "default": "f"}
    size = {"type": "integer", "minimum": number, **texts}
    named = {"description": {"type": "string", **texts}, "default": {"items": size, **texts}}
    either = {"anyOf": [size, {"$ref": "#/$defs/A"}], "$comment": "c", "deprecated": True}
    schema = {"properties": {**named, "either": either, "mode": {"const": texts}}, **texts}
    return Tool(f"f{number}", "d" * 400, {**schema, "$defs": {"A": size}})


def test_schema_annotations_are_left_out_of_a_structure() -> None:
    tools = [described(number) for number in range(70)]
    structure = tool_structure(HERMES, ToolUse(tools, "required"))
    assert structure is not None
    assert oversize(structure) == ""
    size = {"type": "integer", "minimum": 7}
    assert tools[7].parameters is not None
    assert structure.value["structures"][7]["schema"] == {
        "type": "object",
        "properties": {
            "description": {"type": "string"},
            "default": {"items": size},
            "either": {"anyOf": [size, {"$ref": "#/$defs/A"}]},
            "mode": tools[7].parameters["properties"]["mode"],
        },
        "$defs": {"A": size},
    }


def test_an_oversized_structure_is_reported() -> None:
    many = {f"a{n}": {"type": "string", "description": "d"} for n in range(20000)}
    structure = tool_structure(HERMES, ToolUse([Tool("f", "", {"properties": many})], "required"))
    assert structure is not None
    assert "values" in oversize(structure)


def test_only_a_named_function_may_be_called(subtests: pytest.Subtests) -> None:
    use = ToolUse([WEATHER, CLOCK], "required", ("get_time",), parallel=False)
    for name in NAMES:
        with subtests.test(name):
            structure = tool_structure(tool_family(name), use)
            assert structure is not None
            (one,) = structure.value["structures"]
            assert "get_time" in one["begin"]
            assert "NAME" not in one["begin"]
            assert structure.value["stop_after_first"]
            assert all(one["begin"].startswith(t) for t in structure.value["triggers"])


def test_strict_arguments_match_their_schema_in_a_free_choice() -> None:
    structure = tool_structure(HERMES, ToolUse([STRICT, CLOCK]))
    assert structure is not None
    assert structure.param == "tools"
    assert not structure.value["required"]
    assert [(one["schema"], one["lenient"]) for one in structure.value["structures"]] == [
        (SCHEMA, False),
        ({"type": "object"}, True),
    ]


def test_only_allowed_tools_are_in_the_structure() -> None:
    structure = tool_structure(HERMES, ToolUse([WEATHER, CLOCK], "auto", ("get_weather",)))
    assert structure is not None
    assert len(structure.value["structures"]) == 1
    assert not structure.value["required"]


def test_required_calls_need_a_parser() -> None:
    with pytest.raises(TextError) as error:
        tool_structure(None, ToolUse([WEATHER], "required"))
    assert error.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "reasoning", "end", "after"),
    [
        ("hermes", "think", "assistant\n", "</think>"),
        ("hermes", "think", "assistant\n<think>\n", "</think>"),
        ("hermes", "think", "<think>\n\n</think>\n\n", ""),
        ("hermes", "", "assistant\n", ""),
        ("gpt_oss", "gpt_oss", "<|start|>assistant", ""),
    ],
)
def test_a_tool_structure_binds_after_the_thought(
    tools: str, reasoning: str, end: str, after: str
) -> None:
    families = tool_family(tools), reasoning_family(reasoning)
    use = ToolUse([WEATHER], "required")
    made = with_structure(RequestedSampling(), families, use, end, continues=False)
    assert made.structure == tool_structure(families[0], use)
    assert made.structure_after == after


def test_a_structure_of_the_client_binds_after_the_thought() -> None:
    sampling = RequestedSampling(structure=Structure("json_object", None, "response_format"))
    made = with_structure(sampling, (HERMES, THINK), None, "assistant\n", continues=False)
    assert made.structure == sampling.structure
    assert made.structure_after == "</think>"
    final = with_structure(
        sampling, (None, reasoning_family("gpt_oss")), None, "<|start|>assistant", continues=False
    )
    assert final.structure_after == "<|channel|>final"
    assert final.structure is not None
    assert final.structure.lead == "<|message|>"  # rules out <|constrain|>json in between
    begun = "<|start|>assistant<|channel|>final<|message|>"
    final = with_structure(
        sampling, (None, reasoning_family("gpt_oss")), None, begun, continues=False
    )
    assert (final.structure, final.structure_after) == (sampling.structure, "")
    assert (
        with_structure(RequestedSampling(), (HERMES, THINK), None, "x", continues=False)
        == RequestedSampling()
    )


@pytest.mark.parametrize("content", ["Answer: ", [{"type": "text", "text": "Answer: "}]])
@pytest.mark.anyio
async def test_a_structure_binds_at_once_in_a_continued_message(content: Any) -> None:
    card, blobs = served()
    blobs[card.template_digest] = b"</think>{{ messages[-1].content }}"
    service = scripted_service(FakeRouter(saying("x"), [card], blobs))
    structure = Structure("choice", ["yes", "no"], "guided_choice")

    async def starts(content: Any) -> tuple[bool, bool]:
        """Whether the structure binds at once, and whether the answer begins in a thought."""
        messages = [{"role": "assistant", "content": content}]
        conversation = TemplateInput(messages, False, continue_final_message=True)
        request = ChatCompletionRequest(
            "tiny", conversation, RequestedSampling(structure=structure)
        )
        async with service.prepare(request, Caller("r1")) as completion:
            assert completion.prompts[0].params.grammar.source
            return not completion.prompts[0].params.grammar.begins_after, completion.format.open

    assert await starts(content) == (True, False)
    opened = json.loads(json.dumps(content).replace("Answer", "<think>Well"))
    assert await starts(opened) == (False, True)
    ended = json.loads(json.dumps(content).replace("Answer", "<think>\\n</think>Well"))
    assert await starts(ended) == (True, False)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("inline", [False, True])
def test_a_continued_message_of_harmony_shows_no_tags(called: bool, inline: bool) -> None:
    families = tool_family("gpt_oss"), reasoning_family("gpt_oss")
    use = ToolUse([WEATHER]) if called else None
    form = answer_format(families, use, "Once upon", continues=True, inline=inline)
    more = (
        " a time<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
        "<|message|>{}<|call|>"
    )
    for text, calls in ((" a time.<|return|>", 0), (" a time", 0), (more, int(called))):
        for pieces in ([text], text):
            parser = form.parser()
            assert parser is not None
            content = [part for piece in pieces for part in parser.push(piece)]
            content += parser.finish()
            assert text_of(content).startswith(" a time")
            assert "<" not in text_of(content)
            assert len(calls_of(content)) == calls


def test_a_thinking_budget_uses_the_tags_of_the_model() -> None:
    sampling = RequestedSampling(thinking_budget=4, thinking_budget_field="reasoning_budget")

    def tags(name: str) -> tuple[str, str] | None:
        families = None, reasoning_family(name)
        return with_structure(
            sampling, families, None, "assistant\n", continues=False
        ).thinking_tags

    assert tags("think") == ("<think>", "</think>")
    assert tags("mistral") == ("[THINK]", "[/THINK]")
    assert tags("gpt_oss") == ("<|channel|>analysis<|message|>", "<|end|>")
    with pytest.raises(TextError) as error:
        tags("none")
    assert error.value.param == "reasoning_budget"


def test_two_structures_are_refused() -> None:
    sampling = RequestedSampling(structure=Structure("json_object", None, "response_format"))
    with pytest.raises(TextError) as error:
        with_structure(
            sampling, (HERMES, THINK), ToolUse([WEATHER], "required"), "", continues=False
        )
    assert error.value.param == "response_format"


def test_a_structure_beside_tools_leaves_room_for_calls(subtests: pytest.Subtests) -> None:
    tagged = [name for name in NAMES if tool_family(name).has_tags]
    for name, tool in product(tagged, (WEATHER, STRICT)):
        with subtests.test(name=name, strict=tool.strict):
            sampling = RequestedSampling(
                structure=Structure("json_schema", SCHEMA, "response_format")
            )
            use = ToolUse([tool, CLOCK])
            family = tool_family(name)
            found = with_structure(sampling, (family, THINK), use, "", continues=False)
            assert found.structure_after == "</think>"
            assert found.structure is not None
            assert found.structure.param == "response_format"
            text = '{"city": "<tool_call>"}'
            options = {"continues": False, "inline": False, "structured": True}
            form = answer_format((family, None), use, "", **options)
            begin = family.form.begin.replace("NAME", tool.name)
            held = f'{begin}{{"city": "Paris"}}{family.form.end}'
            for answer in (text, held if tool.strict else TOOL_ANSWERS[name].call):
                for pieces in ([answer], answer):
                    parser = form.parser()
                    assert parser is not None
                    content = [part for piece in pieces for part in parser.push(piece)]
                    content += parser.finish()
                    assert text_of(content) == (text if answer is text else "")
                    assert len(calls_of(content)) == (answer is not text)
            source = compiler().compile(replace(found.structure, lead=""))
            walk = Walk(source)
            assert walk.take(text)
            assert walk.may_end
            random_answer = Walk(source).finish(random.Random(3))
            if random_answer[0] == "{":
                assert json.loads(random_answer)
            else:
                assert random_answer.startswith(family.form.trigger)


def read_calls(form: AnswerFormat, text: str) -> list[Any]:
    parser = form.parser()
    assert parser is not None
    return calls_of(parser.push(text) + parser.finish())


def test_a_strict_call_matches_its_schema_in_every_format(
    subtests: pytest.Subtests,
) -> None:
    """Any text that the grammar accepts and the parser reads as a call has valid arguments."""
    use = ToolUse([STRICT, CLOCK])
    others = (
        '{"name": "get_weather", "arguments": {"city": 7}}',
        '{"name":"get_weather","parameters":{"city":7}}',
        '{"type": "function", "name": "get_weather", "parameters": {"city": 7}}',
        "[get_weather(city=7)]",
        '<tools>{"name": "get_weather", "arguments": {"city": 7}}</tools>',
        '<tool_call>[{"name": "get_weather", "arguments": {"city": 7}}]</tool_call>',
        '<function=get_weather>{"city": 7}</function>',
        "<function=get_weather><parameter=town>7</parameter></function>",
        "<|python_tag|>get_weather.call(city=7)",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": 7}}]<|/tool_call|>',
    )
    for name in NAMES:
        family = tool_family(name)
        if family.make_parser is not None:
            continue
        form = answer_format((family, None), use, "", continues=False, inline=False)
        source = compiler().compile(tool_structure(family, use))
        wrong = [TOOL_ANSWERS[name].calls.replace("Paris", "7").replace('"7"', "7"), *others]
        for text in [*wrong, *(f"so, {text}" for text in wrong)]:
            with subtests.test(name=name, text=text):
                walk = Walk(source)
                if walk.take(text) and walk.may_end:
                    for call in read_calls(form, text):
                        assert isinstance(json.loads(call.arguments).get("city", ""), str)
        begin = family.form.begin.replace("NAME", "get_weather")
        right = f'{begin}{{"city": "Rome"}}{family.form.end}'
        for text in (right, f"so, {right}", f"{right}{right}"):
            with subtests.test(name=name, text=text):
                walk = Walk(source)
                assert walk.take(text)
                assert walk.may_end
                calls = read_calls(form, text)
                assert [json.loads(call.arguments) for call in calls] == (
                    [{"city": "Rome"}] * text.count("Rome")
                )


def test_a_strict_call_is_parsed_without_a_grammar(subtests: pytest.Subtests) -> None:
    """Parse a call in a thought, in an answer that was to begin with one, and in fenced code."""
    use = ToolUse([STRICT])
    for name in ("hermes", "qwen3_coder", "glm45", "llama3_json"):
        family, own = tool_family(name), TOOL_ANSWERS[name].call
        held = f"{family.form.begin.replace('NAME', 'get_weather')}{{}}{family.form.end}"
        thinking = answer_format((family, THINK), use, "<think>\n", continues=False, inline=False)
        free = answer_format((family, THINK), use, "assistant\n", continues=False, inline=False)
        start = answer_format((family, None), use, "assistant\n", continues=False, inline=False)
        for form, text, num_calls in (
            (thinking, f"hm\n{own}", name != "llama3_json"), (free, own, 1),
            (start, own, name in ("hermes", "llama3_json")),
            (thinking, f"hm</think>\n{held}", 1), (free, f"<think>hm</think>{held}", 1),
            (thinking, "hm</think>\n<function=get_weather></function>", 0),
            (start, f"```json\n{held}\n```", 1), (start, f"So:\n```\n{held}\n```\n", 1),
        ):  # fmt: skip
            with subtests.test(name=name, text=text):
                assert len(read_calls(form, text)) == num_calls
                parser = form.parser()
                assert parser is not None
                parts = [part for letter in text for part in parser.push(letter)]
                assert len(calls_of(parts + parser.finish())) == num_calls


def test_arguments_must_be_an_object(subtests: pytest.Subtests) -> None:
    one = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    for schema in (one, {"anyOf": [one]}, {**one, "type": "OBJECT"}, {**one, "type": None}):
        for tool in (Tool("f", "", schema), Tool("f", "", schema, strict=True)):
            with subtests.test(schema=schema, strict=tool.strict):
                structure = tool_structure(HERMES, ToolUse([tool], "required"))
                source = compiler().compile(structure)
                begin = '<tool_call>\n{"name": "f", "arguments": '
                for value in ("7", "[1]", '"x"', "null"):
                    assert not Walk(source).take(begin + value)
                assert Walk(source).take(begin + '{"a": "x"')


@pytest.mark.parametrize("kind", ["json_object", "structural_tag"])
def test_a_structure_without_room_for_calls_is_refused_beside_tools(kind: Any) -> None:
    value = {"structures": [], "triggers": []} if kind == "structural_tag" else None
    sampling = RequestedSampling(structure=Structure(kind, value, "response_format"))
    family = HERMES if kind == "structural_tag" else tool_family("llama3_json")
    with pytest.raises(TextError, match="tools that the model may call") as error:
        with_structure(sampling, (family, THINK), ToolUse([WEATHER]), "", continues=False)
    assert error.value.param == "response_format"
    for tools, use in ((HERMES, ToolUse([WEATHER], "none")), (None, ToolUse([WEATHER]))):
        assert (
            with_structure(sampling, (tools, None), use, "", continues=False).structure
            == sampling.structure
        )


def test_a_structure_binds_only_the_final_message_of_harmony() -> None:
    sampling = RequestedSampling(structure=Structure("json_object", None, "response_format"))
    families = tool_family("gpt_oss"), reasoning_family("gpt_oss")
    found = with_structure(
        sampling, families, ToolUse([WEATHER]), "<|start|>assistant", continues=False
    )
    assert found.structure is not None
    assert (found.structure.kind, found.structure.lead) == ("json_object", "<|message|>")
    assert found.structure_after == "<|channel|>final"
    for use in (ToolUse([STRICT]), ToolUse([WEATHER], "required")):
        with pytest.raises(TextError, match="the form that") as error:
            with_structure(sampling, families, use, "<|start|>assistant", continues=False)
        assert error.value.param == "response_format"


@pytest.mark.parametrize(
    ("name", "pattern"), [("hermes", "call_[0-9a-f]{24}"), ("mistral", "\\w{9}")]
)
def test_call_ids(name: str, pattern: str) -> None:
    """Call ids match the pattern of the family; templates of Mistral refuse any other."""
    ids = set()
    for _ in range(2):
        parser = AnswerFormat(tool_family(name)).parser()
        assert parser is not None
        calls = calls_of(parser.push(TOOL_ANSWERS[name].calls) + parser.finish())
        ids |= {call.id for call in calls}
    assert len(ids) == 4
    assert all(re.fullmatch(pattern, one) for one in ids)


def test_parsers_are_found_by_name() -> None:
    assert ParserChoice().families("hermes", "think") == (HERMES, THINK)
    assert ParserChoice().families("", "") == (tool_family("generic"), None)
    assert ParserChoice("mistral", "none").families("hermes", "think") == (
        tool_family("mistral"),
        None,
    )
    assert ParserChoice("none").families("hermes", "think") == (None, THINK)


@pytest.mark.anyio
async def test_a_prepared_chat_has_the_structure_and_the_parsers() -> None:
    card, blobs = served()
    blobs[card.template_digest] = b"{{ (tools or []) | length }}<tool_call></think>assistant:"
    router = FakeRouter(saying("x"), [card], blobs)
    fields: dict[str, Any] = {
        "model": "tiny",
        "conversation": TemplateInput([{"role": "user", "content": "hi"}]),
        "sampling": RequestedSampling(),
    }
    service = scripted_service(router)
    request = ChatCompletionRequest(**fields, tool_use=ToolUse([WEATHER], "required"))
    async with service.prepare(request, Caller("r1")) as completion:
        assert completion.sampling.structure is not None
        assert completion.sampling.structure_after == "</think>"
        assert (completion.format.tools, completion.format.reasoning) == (HERMES, THINK)
    async with service.prepare(ChatCompletionRequest(**fields), Caller("r2")) as completion:
        assert completion.sampling.structure is None
        assert (completion.format.tools, completion.format.reasoning) == (None, THINK)
    plain = scripted_service(router, parsers=ParserChoice("none", "none"))
    free = ChatCompletionRequest(**fields, tool_use=ToolUse([WEATHER]))
    async with plain.prepare(free, Caller("r3")) as completion:
        assert completion.format.parser() is None
    with pytest.raises(ServiceError, match="tool_parser"):
        async with plain.prepare(request, Caller("r4")):
            pass
