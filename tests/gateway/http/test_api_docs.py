"""/openapi.json describes every route, and /docs loads nothing from other hosts."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes.router import saying
from fakes.tool_model import THINKING, ToolModel, calls
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from oracles.http_errors import CHAT, HI, PLAIN
from oracles.sse import events
from pydantic import BaseModel
from systems.served_gateway import served_gateway

from pdserve.gateway.http.docs import describe, document
from pdserve.gateway.openai import OpenAiApi
from pdserve.services.common.errors import HTTP_STATUS

pytestmark = pytest.mark.anyio


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (ref for key, ref in value.items() if key == "$ref")
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from references(one)


ROUTES = {
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings",
    "POST /v1/responses", "POST /v1/responses/input_tokens",
    "GET /v1/responses/{name}", "DELETE /v1/responses/{name}", "POST /v1/responses/{name}/cancel",
    "GET /v1/responses/{name}/input_items", "POST /tokenize", "POST /detokenize", "POST /rerank",
    "POST /v1/rerank", "POST /score", "POST /v1/score", "POST /v1/messages",
    "POST /v1/messages/count_tokens", "POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}",
    "DELETE /v1/files/{file_id}", "GET /v1/files/{file_id}/content", "POST /v1/batches",
    "GET /v1/batches", "GET /v1/batches/{batch_id}", "POST /v1/batches/{batch_id}/cancel",
    "GET /v1/usage", "GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /ready",
    "POST /shutdown", "GET /health/live", "GET /health/ready",
    "POST /v1/chat/completions/batch", "POST /v2/rerank", "POST /api/chat", "POST /api/generate",
    "POST /api/embed", "POST /api/embeddings", "POST /api/show", "GET /api/tags", "GET /api/ps",
    "GET /api/version", "POST /apply-template", "GET /tokenizer_info", "GET /props", "GET /slots",
    "GET /load",
    "GET /version", "GET /metrics", "GET /fleet/state", "GET /v1/traces/{request_id}",
}  # fmt: skip


@pytest.fixture(scope="module")
def gateway() -> Iterator[httpx.Client]:
    """A client of a gateway with every API and a database."""
    with served_gateway() as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def page(gateway: httpx.Client) -> Any:
    return gateway.get("/openapi.json").json()


def test_every_route_is_described(page: Any) -> None:
    assert page["openapi"].startswith("3.1")
    assert "security" not in page
    models = page["components"]["schemas"]
    assert {ref.rpartition("/")[2] for ref in references(page)} == models.keys()
    for schema in models.values():
        Draft202012Validator.check_schema(schema)
    found = {
        f"{method.upper()} {path}" for path, methods in page["paths"].items() for method in methods
    }
    assert found == ROUTES
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            is_message = path.startswith("/v1/messages")
            other = "OllamaError" if path.startswith("/api/") else "ErrorObject"
            codes = {str(code) for code in HTTP_STATUS.values()} - {"499"}
            assert codes - {"503"} | {"529" if is_message else "503"} <= answers.keys()
            takes = method == "post" and not path.endswith(("/cancel", "/shutdown"))
            assert ("requestBody" in operation) == takes == ("415" in answers)
            assert operation["description"]
            for code in answers.keys() - {"200"}:
                (ref,) = references(answers[code])
                assert ref.endswith(f"/{'MessagesError' if is_message else other}")
            assert "schema" in next(iter(answers["200"]["content"].values()))


def test_each_route_names_the_key_that_it_requires(gateway, page):
    assert page["paths"]["/shutdown"]["post"]["security"] == [{"admin_key": []}]
    assert page["components"]["securitySchemes"].keys() == {"admin_key"}
    with served_gateway(api_keys=("client",)) as url:
        reply = httpx.get(f"{url}/openapi.json", headers={"authorization": "Bearer client"})
    keyed = reply.json()
    assert keyed["security"] == [{"key": []}]
    assert keyed["components"]["securitySchemes"].keys() == {"admin_key", "key"}
    found = {
        path: operation["security"]
        for path, operations in keyed["paths"].items()
        for operation in operations.values()
        if "security" in operation
    }
    probes = ("/health", "/health/live", "/health/ready", "/ready")
    assert found == {"/shutdown": [{"admin_key": []}], **{path: [] for path in probes}}


async def test_the_root_path_is_listed_as_server(make_http):
    page = (await make_http(saying("x"), root_path="/llm").get("/openapi.json")).json()
    assert page["servers"] == [{"url": "/llm"}]


async def test_bounds_are_those_of_sampling(make_http):
    models = (await make_http(saying("x")).get("/openapi.json")).json()["components"]["schemas"]
    body = models["ChatBody"]
    assert body["required"] == ["messages"]
    assert body["properties"]["temperature"]["anyOf"][0] == {
        "type": "number", "minimum": 0, "maximum": 2
    }  # fmt: skip
    assert body["properties"]["top_logprobs"]["anyOf"][0]["maximum"] == 20
    message = models["MessagesBody"]["properties"]
    assert message["temperature"]["anyOf"][0]["maximum"] == 1
    assert message["max_tokens"]["anyOf"][0]["minimum"] == 1
    response = models["ResponsesBody"]["properties"]
    assert response["max_output_tokens"]["anyOf"][0]["minimum"] == 1


def checker(page: Any, route: str, kind: str = "application/json", status: int = 200) -> Any:
    """A validator for the answers of a route that rejects undescribed fields."""
    method, path = route.split()
    content = page["paths"][path][method.lower()]["responses"][str(status)]["content"]
    (ref,) = references(content[kind])
    models = json.loads(json.dumps(page["components"]["schemas"]))
    for model in models.values():
        model.setdefault("additionalProperties", False)
    return Draft202012Validator({"$ref": ref, "components": {"schemas": models}})


@pytest.mark.parametrize(
    ("url", "more"),
    [
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
        (PLAIN, {"prompt": "hello", "logprobs": 2, "echo": True}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_as_described(gateway, page, url, more, stream):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", **more, "n": 2, "return_token_ids": True, "stream": stream}
    if stream:
        body["stream_options"] = options
    else:
        body["prompt_logprobs"] = 1
    check = checker(page, f"POST {url}", "text/event-stream" if stream else "application/json")
    reply = gateway.post(url, json=body)
    answers = events(reply.text) if stream else [reply.json()]
    for answer in answers:
        check.validate(answer)


THOUGHT = "<think>hm</think>Look: " + calls("get_time")
TOOL = {"name": "get_time", "parameters": {"type": "object"}}
REQUEST = {
    CHAT: {"messages": HI, "tools": [{"type": "function", "function": TOOL}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **TOOL}]},
    "/v1/messages": {
        "messages": HI, "max_tokens": 100,
        "tools": [{"name": "get_time", "input_schema": {"type": "object"}}],
    },
    "/api/chat": {"messages": HI, "tools": [{"type": "function", "function": TOOL}]},
}  # fmt: skip


@pytest.mark.parametrize("url", REQUEST)
@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_and_calls_are_as_described(make_http, page, url, stream):
    client = make_http(ToolModel(THOUGHT, template=THINKING))
    reply = await client.post(url, json={"model": "tiny", **REQUEST[url], "stream": stream})
    assert reply.status_code == 200, reply.text
    assert re.search('"type":"(thinking|reasoning)"|reasoning_content|"thinking":', reply.text)
    assert "get_time" in reply.text
    check = checker(page, f"POST {url}", reply.headers["content-type"].partition(";")[0])
    lines = re.findall(r"^(?:data: )?(\{.*)$", reply.text, re.MULTILINE)
    assert len(lines) > (5 if stream else 0)
    for line in lines:
        check.validate(json.loads(line))


RERANK = {"model": "reranker", "query": "a", "documents": ["a", "b"]}
SCORE = {"model": "reranker", "text_1": "a", "text_2": ["a", "b"]}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/embeddings", {"model": "embedder", "input": ["a", "b"]}),
        ("/v1/embeddings", {"model": "embedder", "input": "a", "encoding_format": "base64"}),
        ("/rerank", RERANK),
        ("/v1/rerank", {**RERANK, "return_documents": False}),
        ("/score", SCORE),
        ("/v1/score", SCORE),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": HI}),
        ("/tokenize", {"model": "tiny", "prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"model": "tiny", "tokens": [1]}),
        ("/apply-template", {"model": "tiny", "messages": HI}),
        ("/v2/rerank", RERANK),
        ("/v1/chat/completions/batch", {"model": "tiny", "messages": [HI, HI], "logprobs": True}),
        ("/api/chat", {"model": "tiny", "messages": HI, "stream": False, "logprobs": True}),
        ("/api/generate", {"model": "tiny", "prompt": "hi", "stream": False}),
        ("/api/chat", {"model": "tiny"}),
        ("/api/generate", {"model": "tiny"}),
        ("/api/embed", {"model": "embedder", "input": ["a", "b"]}),
        ("/api/embeddings", {"model": "embedder", "prompt": "a"}),
        ("/api/show", {"model": "tiny"}),
    ],
)
def test_other_answers_are_as_described(gateway, page, url, body):
    reply = gateway.post(url, json=body)
    assert reply.status_code == 200, reply.text
    checker(page, f"POST {url}").validate(reply.json())
    wrong = gateway.post(url, json={**body, "model": 5})
    checker(page, f"POST {url}", status=400).validate(wrong.json())


@pytest.mark.parametrize(
    "url", ["/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/load", "/tokenizer_info"]
)
def test_lists_are_as_described(gateway, page, url):
    reply = gateway.get(url, params={"model": "tiny"})
    assert reply.status_code == 200, reply.text
    checker(page, f"GET {url}").validate(reply.json())


def test_stored_objects_are_as_described(gateway, page):
    def answer_to(route: str, name: str = "", **request: Any) -> Any:
        method, path = route.split()
        reply = gateway.request(method, re.sub(r"\{.*\}", name, path), **request)
        assert reply.status_code == 200, reply.text
        checker(page, route).validate(reply.json())
        return reply.json()

    line = {"method": "POST", "url": CHAT, "body": {"model": "tiny", "messages": HI}}
    # enough that the batch is still running
    lines = [json.dumps({"custom_id": str(n), **line}) for n in range(500)]
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": "\n".join(lines).encode()}}
    file = answer_to("POST /v1/files", **form)["id"]
    answer_to("GET /v1/files")
    answer_to("GET /v1/files/{file_id}", file)
    assert gateway.get(f"/v1/files/{file}/content").headers["content-type"] == next(
        iter(page["paths"]["/v1/files/{file_id}/content"]["get"]["responses"]["200"]["content"])
    )
    new = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    batch = answer_to("POST /v1/batches", json={**new, "metadata": {"a": "b"}})["id"]
    answer_to("GET /v1/batches")
    answer_to("GET /v1/batches/{batch_id}", batch)
    answer_to("POST /v1/batches/{batch_id}/cancel", batch)
    other = answer_to("POST /v1/files", **form)["id"]
    answer_to("DELETE /v1/files/{file_id}", other)
    response = {"model": "tiny", "instructions": "be kind", "top_logprobs": 1}
    response["include"] = ["message.output_text.logprobs"]
    first = answer_to("POST /v1/responses", json={**response, "input": "hi"})["id"]
    more = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    thought = {"type": "reasoning", "summary": [], "content": "hm"}
    given = {**response, "previous_response_id": first, "input": [thought, more, output]}
    second = answer_to("POST /v1/responses", json=given)["id"]
    answer_to("GET /v1/responses/{name}", second)
    items = answer_to("GET /v1/responses/{name}/input_items", second)
    assert len(items["data"]) == 5
    answer_to("DELETE /v1/responses/{name}", second)
    answer_to("GET /v1/usage", params={"group_by": "model"})


def test_the_bounds_of_url_parameters_are_enforced(gateway, page, subtests):
    """Accept a parameter at each of its bounds, and refuse one beyond it by name."""
    request = {"model": "tiny", "input": "hi", "max_output_tokens": 1}
    response_id = gateway.post("/v1/responses", json=request).json()["id"]
    latest_report = {"end_time": 1 << 40, "bucket_width": "1h"}  # which has room for every bound
    bounds = {"minimum": -1, "maximum": 1, "exclusiveMaximum": 1, "maxItems": 1}  # one step beyond
    checked = set()
    for path, methods in page["paths"].items():
        others = latest_report if path == "/v1/usage" else {}
        for parameter in methods.get("get", {}).get("parameters", ()):
            name, schema = parameter["name"], parameter["schema"]
            for bound in bounds.keys() & schema.keys():
                at = schema[bound] - (bound == "exclusiveMaximum")
                for number in (at, at + bounds[bound]):
                    value = ["x"] * number if bound == "maxItems" else number
                    url, params = path.replace("{name}", response_id), {**others, name: value}
                    with subtests.test(path=path, name=name, bound=bound, number=number):
                        reply = gateway.get(url, params=params)
                        refused = reply.status_code == 400 and name in reply.text
                        assert refused == (number != at), reply.text
                        checked.add((path, name, bound))
    assert len(checked) >= 14


def test_a_schema_name_belongs_to_one_model():
    class First(BaseModel):
        one: int

    class Second(BaseModel):
        other: int

    Second.__name__ = First.__name__
    app = FastAPI()
    app.get("/first", **describe(response=First))(lambda: None)
    app.get("/second", **describe(response=Second))(lambda: None)
    api = OpenAiApi(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="named First"):
        document(app, [api], "", keys=False)


def test_routes_are_in_groups_with_names(page: Any) -> None:
    names = [group["name"] for group in page["tags"]]
    operations = [one for methods in page["paths"].values() for one in methods.values()]
    assert {name for one in operations for name in one["tags"]} == set(names)
    assert all(len(one["tags"]) == 1 for one in operations)
    operation = page["paths"]["/v1/files/{file_id}/content"]["get"]
    assert (operation["tags"], operation["summary"]) == (["Files and batches"], "Download a file")
    assert page["paths"]["/health"]["get"]["tags"] == ["Server"]


async def test_the_docs_page_loads_nothing_from_other_hosts(make_http):
    client = make_http(saying("x"), keys=("k",))
    assert (await client.get("/openapi.json")).status_code == 401
    page = await client.get("/docs")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    folder = await client.get("/docs/")
    assert (folder.status_code, folder.headers["location"]) == (307, "../docs")
    needed = re.findall(r'(?:src|href)="(docs/[^"]+)"', page.text)
    assert len(needed) == 4
    for path in needed:
        reply = await client.get(f"/{path}")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(
            "text/css" if path.endswith("css") else "text/javascript"
        )
        assert "://" not in page.text + (reply.text if "swagger" not in path else "")
    key = {"authorization": "Bearer k"}
    description = (await client.get("/openapi.json", headers=key)).json()
    assert description["security"] == [{"key": []}]
