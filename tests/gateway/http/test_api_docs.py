"""/openapi.json describes every route, and /docs needs nothing from elsewhere."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_router import FakeRouter, saying
from fastapi import FastAPI
from http_errors import CHAT, HI, PLAIN
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from sse import events

from pdserve.gateway.http.docs.document import described, document
from pdserve.gateway.http.docs.pages import PAGE, START
from pdserve.gateway.openai.dialect import OpenAiDialect
from pdserve.services.host.errors import HTTP_STATUS

pytestmark = pytest.mark.anyio


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (ref for key, ref in value.items() if key == "$ref")
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from references(one)


async def test_every_route_is_described(make_http):
    client = make_http(saying("x"), root_path="/llm")
    page = (await client.get("/openapi.json")).json()
    assert page["openapi"].startswith("3.1")
    assert page["servers"] == [{"url": "/llm"}]
    assert "security" not in page
    models = page["components"]["schemas"]
    assert {ref.rpartition("/")[2] for ref in references(page)} == models.keys()
    for schema in models.values():
        Draft202012Validator.check_schema(schema)
    found = {
        f"{method.upper()} {path}" for path, methods in page["paths"].items() for method in methods
    }
    assert found == {
        "POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize",
        "GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /ready", "GET /version",
        "GET /metrics",
    }  # fmt: skip
    for methods in page["paths"].values():
        for method, operation in methods.items():
            answers = operation["responses"]
            codes = {str(code) for code in HTTP_STATUS.values()} - {"499"}
            assert codes <= answers.keys()
            assert ("requestBody" in operation) == (method == "post") == ("415" in answers)
            for code in answers.keys() - {"200"}:
                (ref,) = references(answers[code])
                assert ref.endswith("/ErrorObject")


async def test_bounds_are_those_of_sampling(make_http):
    page = (await make_http(saying("x")).get("/openapi.json")).json()
    body = page["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["model", "messages"]
    assert body["properties"]["temperature"]["anyOf"][0] == {
        "type": "number", "minimum": 0, "maximum": 2
    }  # fmt: skip
    assert body["properties"]["top_logprobs"]["anyOf"][0]["maximum"] == 20


@pytest.mark.parametrize(
    ("url", "more"),
    [
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
        (PLAIN, {"prompt": "hello", "logprobs": 2, "echo": True}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_as_described(make_http, url, more, stream):
    client = make_http(FakeRouter(saying("hello world")))
    page = (await client.get("/openapi.json")).json()
    content = page["paths"][url]["post"]["responses"]["200"]["content"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "tiny", **more, "n": 2, "return_token_ids": True, "stream": stream}
    if stream:
        asked["stream_options"] = options
        (ref,) = references(content["text/event-stream"])
    else:
        (ref,) = references(content["application/json"])
    reply = await client.post(url, json=asked)
    answers = events(reply.text) if stream else [reply.json()]
    # Nothing is in an answer that is not described.
    models = json.loads(json.dumps(page["components"]["schemas"]))
    for model in models.values():
        model.setdefault("additionalProperties", False)
    checker = Draft202012Validator({"$ref": ref, "components": {"schemas": models}})
    for answer in answers:
        checker.validate(answer)


def test_a_name_stands_for_one_model():
    class First(BaseModel):
        one: int

    class Second(BaseModel):
        other: int

    Second.__name__ = First.__name__
    app = FastAPI()
    app.get("/first", **described(answer=First))(lambda: None)
    app.get("/second", **described(answer=Second))(lambda: None)
    dialect = OpenAiDialect(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="named First"):
        document(app, [dialect], "", keys=False)


async def test_the_page_needs_nothing_from_elsewhere(make_http):
    client = make_http(saying("x"), keys=("k",))
    key = {"authorization": "Bearer k"}
    for path in ("/docs", "/openapi.json", "/docs/swagger-ui-bundle.js"):
        assert (await client.get(path)).status_code == 401
    page = await client.get("/docs", headers=key)
    assert page.text == PAGE
    assert "://" not in PAGE + START
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    needed = re.findall(r'(?:src|href)="(docs/[^"]+)"', PAGE)
    assert len(needed) == 3
    for path in needed:
        reply = await client.get(f"/{path}", headers=key)
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(
            "text/css" if path.endswith("css") else "text/javascript"
        )
    assert "SwaggerUIBundle" in (await client.get(f"/{needed[1]}", headers=key)).text
    page = (await client.get("/openapi.json", headers=key)).json()
    assert page["security"] == [{"key": []}]
