"""The fields of structured outputs: what is sent to workers, and what is refused."""

import json
from itertools import product
from typing import Any

import pytest
from fakes.router import FakeRouter, saying, served
from oracles.grammar_walks import Walk
from oracles.http_errors import CHAT, HI, PLAIN, check

from pdserve.engine.api import MAX_STRUCTURE_CHARS, MAX_STRUCTURE_DEPTH, MAX_STRUCTURE_VALUES
from pdserve.gateway.http.api import HttpLimits

pytestmark = pytest.mark.anyio
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    PLAIN: {"model": "tiny", "prompt": "a"},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<t>", "schema": SCHEMA, "end": "</t>"}],
    "triggers": ["<t"],
}  # fmt: skip
A, OTHER = '{"a": 1}', '{"b": [true]}'
GBNF = 'root ::= "x" [0-9]+'
WIDE = HttpLimits(1 << 22, 1 << 26, 60, max_buffer_bytes=1 << 16, stall_s=60)

# (fields, a text that matches, a text that does not)
REQUEST = [
    ({"response_format": {"type": "json_object"}}, OTHER, "[]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, A, OTHER),
    (
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "description": "d", "schema": SCHEMA, "strict": True}}},
        A, OTHER,
    ),
    ({"response_format": {"type": "structural_tag", **TAG}}, f"so <t>{A}</t>", f"<t>{OTHER}"),
    ({"structured_outputs": {"json": SCHEMA}}, A, OTHER),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, A, OTHER),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":1}', A),
    ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, OTHER, "[]"),
    ({"structured_outputs": {"regex": "a+b"}}, "aab", "b"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": 'start: "s" | "t"'}}, "t", "u"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, f"<t>{A}</t>", f"<t>{OTHER}"),
    ({"guided_json": SCHEMA}, A, OTHER),
    ({"guided_json": json.dumps(SCHEMA)}, A, OTHER),
    ({"guided_regex": "a+b"}, "aab", "b"),
    ({"guided_choice": ["yes", "no"]}, "yes", "maybe"),
    ({"guided_grammar": GBNF}, "x12", "x"),
    ({"regex": "a+b"}, "aab", "b"),
    ({"ebnf": GBNF}, "x12", "y"),
    ({"json_schema": json.dumps(SCHEMA)}, A, OTHER),
    ({"json_schema": SCHEMA}, A, OTHER),
    ({"json_schema": {}}, OTHER, "x"),
    ({"grammar": GBNF}, "x1", "1"),
    ({"structural_tag": TAG}, f"<t>{A}</t>", f"<t>{OTHER}"),
]  # fmt: skip


async def test_workers_receive_the_grammar(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for (fields, right, wrong), url in product(REQUEST, BODIES):
        with subtests.test(fields=fields, url=url):
            router.starts.clear()
            reply = await client.post(url, json={**BODIES[url], **fields})
            assert reply.status_code == 200, reply.json()
            (start,) = router.starts
            assert list(start.params.grammar.begins_after) == []
            answer = Walk(start.params.grammar.source)
            assert answer.take(right)
            assert answer.may_end
            other = Walk(start.params.grammar.source)
            assert not (other.take(wrong) and other.may_end)


NOTHING = [
    {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}},
    {"structured_outputs": {"json": None, "json_object": False, "whitespace_pattern": None}},
    {"grammar": "", "regex": "", "ebnf": "", "json_schema": "", "guided_json": None},
]  # fmt: skip


@pytest.mark.parametrize("url", BODIES)
async def test_fields_without_a_structure_are_accepted(make_http, url):
    router = FakeRouter(saying("x"))
    for fields in NOTHING:
        reply = await make_http(router).post(url, json={**BODIES[url], **fields})
        assert reply.status_code == 200, reply.json()
    assert not any(start.params.HasField("grammar") for start in router.starts)


FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
WRONG = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
    (
        {"response_format": {"type": "structural_tag", **TAG, "triggers": ["<x"]}},
        "response_format",
    ),
    ({"structured_outputs": {"whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
    (
        {"structured_outputs": {"disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_json": {"type": "object", "not": {}}}, "guided_json"),
    ({"guided_regex": "(?=a)"}, "guided_regex"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    ({"json_schema": False}, "json_schema"),
    ({"ebnf": "?"}, "ebnf"),
]  # fmt: skip


async def test_an_invalid_field_is_named(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for (fields, param), url in product(WRONG, BODIES):
        with subtests.test(fields=fields, url=url):
            router.starts.clear()
            check(await client.post(url, json={**BODIES[url], **fields}), 400, param)
            assert router.starts == []


@pytest.mark.parametrize("url", BODIES)
async def test_unenforceable_schemas_are_refused_only_if_strict(make_http, url):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for strict in (True, False, None):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        if strict is not None:
            form["json_schema"]["strict"] = strict  # type: ignore[index]
        reply = await client.post(url, json={**BODIES[url], "response_format": form})
        if strict:
            error = check(reply, 400, "response_format")
            place = "response_format.json_schema.schema.properties.a.uniqueItems"
            assert error["message"].startswith(f"{place}: ")
        else:
            assert reply.status_code == 200, reply.json()
    assert len(router.starts) == 2
    assert Walk(router.starts[0].params.grammar.source).take('{"a": [1, 1]}')


TWO_STRUCTURES = [
    ({"regex": "a", "guided_json": SCHEMA}, "regex"),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
     "structured_outputs.regex"),
    ({"structured_outputs": {"json_object": True, "choice": ["a"]}},
     "structured_outputs.json_object"),
    ({"grammar": GBNF, "json_schema": SCHEMA}, "grammar"),
]  # fmt: skip


async def test_one_structure_at_a_time(make_http, subtests):
    client = make_http(saying("x"))
    for (fields, param), url in product(TWO_STRUCTURES, BODIES):
        with subtests.test(fields=fields, url=url):
            reply = await client.post(url, json={**BODIES[url], **fields})
            error = check(reply, 400, param)
            assert error["message"].startswith("set either ")
            assert error["message"].endswith(f" or {param}, not both")


@pytest.mark.parametrize("url", BODIES)
async def test_options_that_move_the_end_are_refused_with_a_structure(make_http, url):
    client = make_http(saying("x"))
    for name, value in (("min_tokens", 1), ("ignore_eos", True)):
        body = {**BODIES[url], "max_tokens": 5, "guided_regex": "a", name: value}
        error = check(await client.post(url, json=body), 400, name)
        assert "guided_regex" in error["message"]
    body = {**BODIES[url], "guided_regex": "a", "min_tokens": 0, "ignore_eos": False}
    assert (await client.post(url, json=body)).status_code == 200


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fits", "beyond", "said"),
    [
        (nested(MAX_STRUCTURE_DEPTH - 2), nested(MAX_STRUCTURE_DEPTH), "deep"),
        (
            {"enum": [0] * (MAX_STRUCTURE_VALUES - 5)},
            {"enum": [0] * MAX_STRUCTURE_VALUES},
            "values",
        ),
        (
            {"const": "x" * (MAX_STRUCTURE_CHARS // 4)},
            {"const": "x" * MAX_STRUCTURE_CHARS},
            "characters",
        ),
    ],
    ids=["depth", "values", "characters"],
)
async def test_the_size_of_a_structure_is_bounded(make_http, fits, beyond, said):
    client = make_http(saying("x"), bounds=WIDE)
    reply = await client.post(PLAIN, json={**BODIES[PLAIN], "guided_json": fits})
    assert reply.status_code == 200, reply.json()
    reply = await client.post(PLAIN, json={**BODIES[PLAIN], "guided_json": beyond})
    assert said in check(reply, 400, "guided_json")["message"]
    text = json.dumps({"enum": ["x" * 300_000]})
    check(await client.post(PLAIN, json={**BODIES[PLAIN], "guided_json": text}), 400, "guided_json")


async def test_a_model_without_eos_accepts_no_structure(make_http):
    card, blobs = served()
    card.ClearField("eos_ids")
    router = FakeRouter(saying("x"), [card], blobs)
    client = make_http(router)
    error = check(await client.post(PLAIN, json={**BODIES[PLAIN], "regex": "a"}), 400, "regex")
    assert "does not support structured output" in error["message"]
    assert (await client.post(PLAIN, json={**BODIES[PLAIN], "max_tokens": 1})).status_code == 200
