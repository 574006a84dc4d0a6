"""docs/api.md matches the code, and each of its rows holds for a running application."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types.beta import message_count_tokens_params, message_create_params
from api_page import IGNORED, LEFT_OUT, REFUSED, ROUTES, SERVED, page
from builders.api_fields import (
    BATCHES,
    COUNT,
    EMBEDDINGS,
    FILES,
    GIVEN,
    INPUT_TOKENS,
    LEAST,
    MESSAGES,
    OWN,
    RESPONSES,
)
from fakes.router import FakeRouter
from fakes.scripted_parts import MemoryStore
from fakes.tool_model import THINKING
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from oracles.http_errors import CHAT, LARGE, PLAIN
from systems.served_gateway import every_kind, served_gateway

pytestmark = pytest.mark.anyio
PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()
# The fields that the package of each client can send.
KNOWN_TO_CLIENTS: dict[str, Any] = {
    CHAT: chat_create_params.CompletionCreateParamsStreaming,
    PLAIN: completion_create_params.CompletionCreateParamsStreaming,
    RESPONSES: response_create_params.ResponseCreateParamsStreaming,
    INPUT_TOKENS: input_token_count_params.InputTokenCountParams,
    EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
    MESSAGES: message_create_params.MessageCreateParamsStreaming,
    COUNT: message_count_tokens_params.MessageCountTokensParams,
    FILES: file_create_params.FileCreateParams,
    BATCHES: batch_create_params.BatchCreateParams,
}
FATES = (SERVED, IGNORED, LEFT_OUT, REFUSED)
PAIRS = {"queries", "documents", "items", "data_1", "data_2"}  # instead of text_1 and text_2
ANYTHING = ("user",)  # fields whose value is not checked
WRONG = ({"x": {"x": []}}, 0.5, "x")  # no other field accepts all of them
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # one value of each type


def rows(path: str, what: str) -> dict[str, str]:
    """The field and the value of each row of a route with this status."""
    (table,) = re.findall(rf"^## POST {path}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^\| `(\w+)` \| ?(.*?) \| (\w[\w ]*)(?:;.*)? \|$", table, re.MULTILINE)
    return {name: value for name, value, here in found if here == what}


def here(path: str) -> set[str]:
    """All fields of a route on the page."""
    return {name for what in FATES for name in rows(path, what)}


def test_the_page_matches_the_code() -> None:
    assert page() == PAGE, "`make docs` regenerates docs/api.md"
    assert {route.path for route in ROUTES} == LEAST.keys() | {FILES, BATCHES}
    for path in LEAST:
        count = sum(len(rows(path, what)) for what in FATES)
        assert count == len(here(path)), "each field must have one row"


@pytest.mark.parametrize("path", KNOWN_TO_CLIENTS)
def test_client_fields_are_on_the_page(path: str) -> None:
    kind = KNOWN_TO_CLIENTS[path]
    sent = kind.__required_keys__ | kind.__optional_keys__
    assert len(sent) >= 3
    assert sent <= here(path)


# Fields that do not change the answer.
HINTS = {
    "include", "metadata", "priority", "prompt_cache_key", "safety_identifier", "session_id",
    "store", "stream_options", "user",
}  # fmt: skip


def test_fields_served_by_one_route_are_listed_for_every_route() -> None:
    """List every such field, because a field in no table would be dropped silently."""
    generating = (CHAT, PLAIN, RESPONSES, MESSAGES, "/api/chat", "/api/generate")
    served = {name for path in generating for name in rows(path, SERVED)}
    assert len(served) > 60
    for path in generating:
        assert served - here(path) <= HINTS, path


@pytest.fixture
def router() -> FakeRouter:
    made = every_kind()
    made.blobs[made.cards[0].template_digest] = THINKING.encode()
    return made


@pytest.fixture
async def client(make_http: Any, router: FakeRouter, anyio_backend: str) -> httpx.AsyncClient:
    made: httpx.AsyncClient = make_http(router, responses=MemoryStore(), bounds=LARGE)
    return made


def error_of(reply: httpx.Response) -> str:
    """The field that an error names, in the shape of its API."""
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    if isinstance(error, str):
        error = {"message": error}
    return str(error["param"] if "param" in error else error["message"].split(":")[0].split()[0])


@pytest.mark.parametrize("path", LEAST)
async def test_each_served_field_is_accepted(client, path):
    served = rows(path, SERVED)
    assert served
    for name in served:
        given = OWN[path, name] if (path, name) in OWN else GIVEN[name]
        if name == "previous_response_id":
            first = (await client.post(RESPONSES, json=LEAST[RESPONSES])).json()
            given = {"previous_response_id": first["id"]}
        body = {**LEAST[path], **given}
        if given.keys() & {"messages", "prompt_token_ids"}:
            body.pop("prompt", None)
        if path == "/score" and PAIRS & given.keys():
            del body["text_1"], body["text_2"]
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, (name, reply.text)
        if name not in ANYTHING or path == RESPONSES:
            wrong = [await client.post(path, json={**body, name: value}) for value in WRONG]
            statuses = {reply.status_code for reply in wrong}
            assert statuses & {400, 404}, f"{name} is not checked"


@pytest.mark.parametrize("path", LEAST)
async def test_ignored_fields_do_not_change_the_answer(client, router, path):
    async def answer_to(**more: Any) -> tuple[str, Any]:
        reply = await client.post(path, json={**LEAST[path], **more})
        assert reply.status_code == 200, (more, reply.text)
        text = re.sub(r"[0-9a-f]{32}", "ID", reply.text)
        sent = [(list(start.prompt_ids), start.params) for start in router.starts]
        router.starts.clear()
        times = r'"(created|created_at|completed_at|\w+_duration)":(\d+|"[^"]*")'
        return re.sub(times, "", text), sent

    plain = await answer_to()
    ignored = [*rows(path, IGNORED), *rows(path, LEFT_OUT)]
    few = "tokenize" in path or path.startswith(("/api/", "/apply"))
    assert len(ignored) > (1 if few else 5)
    for number, name in enumerate(ignored):
        for value in WANTED[number % 2 :: 2]:
            assert await answer_to(**{name: value}) == plain, name


@pytest.mark.parametrize("path", LEAST)
async def test_refused_fields_are_named(client, path):
    refused = rows(path, REFUSED)
    assert refused
    for number, (name, value) in enumerate(refused.items()):
        taken = [json.loads(word) for word in re.findall(r"`(.*?)`", value)]
        others = [wanted for wanted in WANTED if wanted not in taken]
        for wanted in (others[number % len(others)], others[-1 - number % len(others)]):
            reply = await client.post(path, json={**LEAST[path], name: wanted})
            assert error_of(reply) == name, (wanted, reply.text)
        for nothing in (None, *taken):
            reply = await client.post(path, json={**LEAST[path], name: nothing})
            assert reply.status_code == 200, (name, nothing, reply.text)


@pytest.fixture(scope="module")
def with_database() -> Iterator[httpx.Client]:
    with served_gateway() as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def test_the_form_of_a_file_matches_the_page(with_database: httpx.Client) -> None:
    assert rows(FILES, SERVED).keys() == {"file", "purpose"}
    assert not rows(FILES, IGNORED)
    assert rows(FILES, REFUSED)

    def sent(**form: Any) -> httpx.Response:
        files = {"file": form.pop("file")} if "file" in form else None
        return with_database.post(FILES, data=form, files=files or {"x": (None, "x")})

    assert sent(file=b"x", purpose="batch").status_code == 200
    assert error_of(sent(file=b"x", purpose="vision")) == "purpose"
    assert error_of(sent(file=b"x")) == "purpose"
    for name in rows(FILES, REFUSED):
        assert error_of(sent(file=b"x", purpose="batch", **{name: "x"})) == name
        assert name in error_of(sent(file=b"x", purpose="batch", **{f"{name}[seconds]": "5"}))


def test_the_body_of_a_batch_matches_the_page(with_database: httpx.Client) -> None:
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
    file = with_database.post(FILES, **form).json()["id"]
    least: dict[str, Any] = {
        "input_file_id": file, "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b"}
    }  # fmt: skip
    assert rows(BATCHES, SERVED).keys() == least.keys()
    plain = with_database.post(BATCHES, json=least)
    assert plain.status_code == 200, plain.text
    for name in least:
        assert error_of(with_database.post(BATCHES, json={**least, name: 5})).startswith(name)
    for name in rows(BATCHES, IGNORED):
        reply = with_database.post(BATCHES, json={**least, name: "x"})
        assert reply.json().keys() == plain.json().keys()
    assert "output_expires_after" in rows(BATCHES, REFUSED)
    for name in rows(BATCHES, REFUSED):
        for wanted in WANTED:
            assert error_of(with_database.post(BATCHES, json={**least, name: wanted})) == name
        assert with_database.post(BATCHES, json={**least, name: None}).status_code == 200
