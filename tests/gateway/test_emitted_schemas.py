"""Schemas as programs emit them: a refused one is named by its path in every API, any other is
enforced."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from fakes.tool_model import ToolModel, calls
from oracles.grammar_walks import Walk, compiler
from pydantic import AnyUrl, BaseModel, Field, SecretStr

from pdserve.text import Structure

pytestmark = pytest.mark.anyio
EMAIL = r"^(?!\.)(?!.*\.\.)[\w.+-]+@[\w-]+(\.[\w-]+)+$"  # with look-around, as zod writes it
HI = [{"role": "user", "content": "hi"}]


def contact(**email: Any) -> dict[str, Any]:
    """The schema of zod's z.object({email: z.email(), tags: z.record(z.string(), z.number())})."""
    tags = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"email": {"type": "string", "format": "email", **email}, "tags": tags},
        "required": ["email", "tags"],
        "additionalProperties": False,
    }


def bodies(schema: dict[str, Any], strict: bool | None) -> dict[str, tuple[dict[str, Any], str]]:
    """Requests with the schema and its path in them, by URL."""
    first = {"name": "first", "parameters": {"type": "object"}}
    other = {"name": "save", "parameters": schema, "strict": strict}
    chat = [{"type": "function", "function": one} for one in (first, other)]
    messages = [
        {"name": one["name"], "input_schema": one["parameters"], "strict": one.get("strict")}
        for one in (first, other)
    ]
    return {
        "/v1/chat/completions": (
            {"messages": HI, "tools": chat, "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        "/v1/responses": (
            {
                "input": "hi",
                "tools": [{"type": "function", **one} for one in (first, other)],
                "tool_choice": "required",
            },
            "tools[1].parameters",
        ),
        "/v1/messages": (
            {"messages": HI, "tools": messages, "tool_choice": {"type": "any"}, "max_tokens": 99},
            "tools[1].input_schema",
        ),
    }


async def test_a_refusal_names_the_path_in_the_request(
    make_http: Callable[..., Any], subtests: pytest.Subtests
) -> None:
    model = ToolModel(calls("first"))
    client = make_http(model)
    for strict, pattern in ((True, True), (True, False), (False, True), (None, True)):
        schema = contact(pattern=EMAIL) if pattern else contact()
        for url, (body, place) in bodies(schema, strict).items():
            with subtests.test(url=url, strict=strict, pattern=pattern):
                model.starts.clear()
                reply = await client.post(url, json={"model": "tiny", **body})
                if strict and pattern:
                    assert reply.status_code == 400
                    message = reply.json()["error"]["message"]
                    assert message.startswith(f"{place}.properties.email.pattern: ")
                    assert reply.json()["error"].get("param", place) == place
                    continue
                assert reply.status_code == 200, reply.text
                begin = '<tool_call>\n{"name": "save", "arguments": {"email": '
                for text, matches in (
                    ('"a@b.cd", "tags": {"x": 1}}}\n</tool_call>', True),
                    ("7", False),
                    ('"a@b.cd", "tags": {"x": "', False),
                ):
                    walk = Walk(model.starts[0].params.grammar.source)
                    assert (walk.take(begin + text) and walk.may_end) == matches, text


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]


class Everything(BaseModel):
    """Types whose schemas have keywords that bind nothing."""

    path: Path
    secret: SecretStr
    data: bytes
    url: AnyUrl
    sizes: dict[str, int]
    pair: tuple[int, str]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    old: int | None = Field(None, deprecated=True, examples=[1])


def test_a_pydantic_schema_is_enforced(subtests: pytest.Subtests) -> None:
    schema = Everything.model_json_schema()
    assert schema["properties"]["pet"]["oneOf"]
    right = (
        '{"path": "/a", "secret": "s", "data": "d", "url": "http://a.b/c", "sizes": {"x": 1}, '
        '"pair": [1, "b"], "pet": {"kind": "dog"}, "old": null}'
    )
    for lenient in (False, True):
        with subtests.test(lenient=lenient):
            source = compiler().compile(Structure("json_schema", schema, "f", lenient=lenient))
            for text in (right, right.replace("dog", "cow"), right.replace('"x": 1', '"x": ""')):
                walk = Walk(source)
                assert (walk.take(text) and walk.may_end) == (text == right), text
