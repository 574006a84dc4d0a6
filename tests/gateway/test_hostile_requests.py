"""Hostile requests: addresses to fetch, slow grammars, and broken tool schemas."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fakes.router import FakeRouter, saying
from oracles.http_errors import CHAT, HI, PLAIN, check
from systems.eventually import eventually
from systems.tokenizer_pools import Pool, workers

pytestmark = pytest.mark.anyio
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
OLLAMA = "/api/chat"


@pytest.fixture
async def pool(anyio_backend: str) -> AsyncIterator[Pool]:
    pool = Pool(workers=1)
    yield pool
    await pool.close()


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A local port to which nothing may connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def has_visitor(trap: socket.socket) -> bool:
    try:
        trap.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def bodies(url: str) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Route, refused field and body, by the kind of field that holds the URL."""

    def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    image = {"type": "image_url", "image_url": {"url": url}}
    schema = {"name": "s", "schema": {"type": "object", "properties": {"a": {"$ref": url}}}}
    source = {"type": "url", "url": url}
    part, of_input = "messages[0].content[0].type", "input[0].content[0].type"
    return {
        "image": (CHAT, part, {"messages": user(image)}),
        "video": (CHAT, part, {"messages": user({"type": "video_url", "video_url": {"url": url}})}),
        "audio": (CHAT, part, {"messages": user({"type": "audio_url", "audio_url": {"url": url}})}),
        "image to embed": (EMBEDDINGS, "messages", {"messages": user(image)}),
        "template": (CHAT, "chat_template", {"messages": HI, "chat_template": url}),
        "schema of an answer": (
            CHAT,
            "response_format",
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": schema}},
        ),
        "schema": (PLAIN, "guided_json", {"prompt": "hi", "guided_json": {"$ref": url}}),
        "input image": (
            RESPONSES,
            of_input,
            {"input": user({"type": "input_image", "image_url": url})},
        ),
        "input file": (
            RESPONSES,
            of_input,
            {"input": user({"type": "input_file", "file_url": url})},
        ),
        "MCP server": (
            RESPONSES,
            "tools[0].type",
            {"input": "hi", "tools": [{"type": "mcp", "server_label": "s", "server_url": url}]},
        ),
        "image source": (
            MESSAGES,
            part,
            {"messages": user({"type": "image", "source": source}), "max_tokens": 5},
        ),
        "document source": (
            MESSAGES,
            part.replace(".type", ".source.type"),
            {"messages": user({"type": "document", "source": source}), "max_tokens": 5},
        ),
        "image of Ollama's": (
            OLLAMA,
            "messages[0].images",
            {"messages": [{**HI[0], "images": [url]}]},
        ),
        "format": (OLLAMA, "format", {"messages": HI, "format": {"$ref": url}}),
        "image of a batch": (f"{CHAT}/batch", "content[0].type", {"messages": [user(image)]}),
        "MCP servers": (
            MESSAGES,
            "mcp_servers",
            {"messages": HI, "max_tokens": 5, "mcp_servers": [{**source, "name": "s"}]},
        ),
    }


# Tools that cannot run here, and references in schemas that are not strict, are dropped.
LEFT_OUT = ("MCP server", "MCP servers", "schema of an answer", "format")


async def test_no_address_from_a_client_is_connected_to(
    make_http: Any, pool: Pool, trap: socket.socket, subtests: pytest.Subtests
) -> None:
    """Include URLs that parsers read differently (CVE-2026-24779)."""
    router = FakeRouter(saying("x"))
    client = make_http(router, text_pool=pool)
    host, port = trap.getsockname()
    for form in ("http://{}/x", "http://{}\\@example.com/x", "http://example.com\\@{}/x"):
        for name, (route, field, body) in bodies(form.format(f"{host}:{port}")).items():
            with subtests.test(f"{name}: {form}"):
                router.starts.clear()
                reply = await client.post(route, json={"model": "tiny", **body})
                if name in LEFT_OUT:
                    assert reply.status_code == 200, reply.text
                else:
                    assert reply.status_code == 400, reply.text
                    assert field in reply.text
                    assert router.starts == []
                assert not has_visitor(trap)
    assert not has_visitor(trap)
    socket.create_connection((host, port)).close()
    assert has_visitor(trap), "the trap must notice a connection"
    assert not has_visitor(trap), "only this test may have connected"


async def test_other_requests_do_not_wait_for_grammars(make_http: Any, pool: Pool) -> None:
    client = make_http(saying("hello"), text_pool=pool)
    plain = {"model": "tiny", "messages": HI}
    assert (await client.post(CHAT, json=plain)).status_code == 200
    hostile = {"model": "tiny", "prompt": "a", "grammar": 'root ::= "a"' + " | root" * 7000}
    pending = asyncio.create_task(client.post(PLAIN, json=hostile))
    await eventually(lambda: len(workers()) == 2)
    for _ in range(3):
        assert (await client.post(CHAT, json=plain)).status_code == 200
    assert not pending.done()
    error = check(await pending, 400, "grammar")
    assert "takes too long" in error["message"]


BROKEN = {
    "pattern that does not parse": {"type": "string", "pattern": "(a"},
    "pattern with a look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "pattern that is no text": {"type": "string", "pattern": 7},
    "unknown type": {"type": "something"},
    "type that is no text": {"type": 7},
    "reference to nothing": {"$ref": "#/$defs/none"},
}


async def test_a_broken_tool_schema_does_not_affect_other_requests(
    make_http: Any, pool: Pool, subtests: pytest.Subtests
) -> None:
    """Cover CVE-2025-48944: `pattern` and `type` in the parameters of a tool."""
    client = make_http(FakeRouter(saying("hello")), text_pool=pool)
    plain = {"model": "tiny", "messages": HI}
    for name, schema in BROKEN.items():
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        tool = {"name": "f", "parameters": parameters}
        for strict in (False, True):
            with subtests.test(f"{name}, strict: {strict}"):
                tools = [{"type": "function", "function": {**tool, "strict": strict}}]
                body = {**plain, "tools": tools, "tool_choice": "required"}
                reply = await client.post(CHAT, json=body)
                assert reply.status_code == (400 if strict else 200), reply.text
                assert (await client.post(CHAT, json=plain)).status_code == 200
