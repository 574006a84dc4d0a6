"""A stream's head is sent before its first token, and pings follow while the stream is silent."""

import asyncio
import json
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import httpx
import pytest
from fakes.agent_model import LONG_TEXT, NAME, AgentModel
from fakes.router import FakeRouter, failed, placed, saying
from oracles.http_errors import CHAT, HI, PLAIN

from pdserve.gateway.http import responses
from pdserve.gateway.http.responses import HEAD_S
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OLLAMA: dict[str, dict[str, Any]] = {  # JSON lines cannot hold comments
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
    "/api/generate raw": {"prompt": "hi", "raw": True},
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "stream": True},
    PLAIN: {"prompt": "hi", "stream": True},
    RESPONSES: {"input": "hi", "stream": True},
    MESSAGES: {"messages": HI, "max_tokens": 50, "stream": True},
}
SILENCE_S = 0.2


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time between pings."""
    monkeypatch.setattr(responses, "SILENCE_S", SILENCE_S)


class Model:
    """Play a text, or a failure, once released; is silent before the first token and in the
    middle."""

    def __init__(self, ends: Callable[[pb.Start], Any] | None = None) -> None:
        self.goes_on = asyncio.Event()
        self.first_s = self.pause_s = 0.0  # of silence
        self._ends = ends

    async def play(self, router: FakeRouter, start: pb.Start) -> Any:
        yield placed(start)
        await asyncio.sleep(self.first_s)
        await self.goes_on.wait()
        if self._ends is not None:
            yield self._ends(start)
            return
        number = 0
        async for event in saying("hello wide world")(router, start):
            if event.HasField("tokens"):
                number += 1
                await asyncio.sleep(self.pause_s if number == 4 else 0)
            yield event


def sent(text: str) -> list[dict[str, Any]]:
    """The objects of a stream, without its comments."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


async def test_the_head_is_sent_before_the_first_token(serve, subtests):
    for url, body in {**BODIES, **OLLAMA}.items():
        with subtests.test(url):
            model = Model()
            base = await serve(model.play)
            async with (
                httpx.AsyncClient(trust_env=False) as client,
                client.stream("POST", base + url.split()[0], json=body) as reply,
            ):
                assert reply.status_code == 200
                kind = "application/x-ndjson" if url in OLLAMA else "text/event-stream"
                assert reply.headers["content-type"].startswith(kind)
                assert not model.goes_on.is_set()
                model.goes_on.set()
                text = (await reply.aread()).decode()
            assert "ping" not in text
            lines = text.splitlines()
            assert len(list(map(json.loads, lines)) if url in OLLAMA else sent(text)) > 3


def _text_of(url: str, events: list[dict[str, Any]]) -> str:
    if url == CHAT:
        return "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    if url == PLAIN:
        return "".join(choice["text"] for event in events for choice in event["choices"])
    if url == RESPONSES:
        kind = "response.output_text.delta"
        return "".join(event["delta"] for event in events if event["type"] == kind)
    kind = "content_block_delta"
    return "".join(event["delta"]["text"] for event in events if event["type"] == kind)


@pytest.mark.parametrize("over_a_socket", [True, False])
async def test_a_silent_stream_has_pings(serve, make_http, short, subtests, over_a_socket):
    """Ping with and without the extensions of pdserve's server, before the first token and between
    two."""

    async def answer(url: str) -> str:
        model = Model()
        model.first_s, model.pause_s = HEAD_S + 2.5 * SILENCE_S, 2.5 * SILENCE_S
        model.goes_on.set()
        base = await serve(model.play) if over_a_socket else ""
        async with httpx.AsyncClient(trust_env=False) if base else make_http(model.play) as client:
            return (await client.post(base + url, json=BODIES[url])).text

    texts = await asyncio.gather(*map(answer, BODIES))
    for url, text in zip(BODIES, texts, strict=True):
        with subtests.test(url):
            events = sent(text)
            assert _text_of(url, events) == "hello wide world"
            if url == RESPONSES:
                kinds = [event["type"] for event in events]
                assert kinds[:2] == ["response.created", "response.in_progress"]
                assert kinds.count("response.created") == 1
                first = kinds.index("response.output_item.added")
                assert "response.in_progress" in kinds[first:]
                numbers = [event["sequence_number"] for event in events]
                assert numbers == list(range(len(events)))
            elif url == MESSAGES:
                assert 2 <= text.count("event: ping\ndata: ") <= 4
            else:
                assert 2 <= text.count(": ping\n\n") <= 4


async def test_a_ping_of_responses_does_not_repeat_long_fields(make_http, short):
    async def play(router: FakeRouter, start: pb.Start) -> Any:
        async for event in saying("hello")(router, start):
            if event.HasField("finished"):
                await asyncio.sleep(2.5 * SILENCE_S)
            yield event

    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = {**BODIES[RESPONSES], "instructions": "be short", "tools": [tool]}
    events = sent((await make_http(play).post(RESPONSES, json=body)).text)
    opening, *pings = [e["response"] for e in events if e["type"] == "response.in_progress"]
    assert len(pings) == 2
    assert len(events[-1]["response"]["output"]) == 1
    assert (opening["instructions"], len(opening["tools"])) == ("be short", 1)
    for ping in pings:
        assert ping == {**opening, "instructions": None, "output": [], "tools": []}


async def test_an_early_refusal_keeps_its_status(serve, subtests):
    for code, status in (
        (pb.CONTEXT_LENGTH_EXCEEDED, 400), (pb.MODEL_NOT_FOUND, 404), (pb.OVERLOADED, 429),
        (pb.UNAVAILABLE, 503), (pb.QUEUE_TIMEOUT, 503),
    ):  # fmt: skip
        for url, body in BODIES.items():
            with subtests.test(url=url, code=code):
                model = Model(lambda start, code=code: failed(start, code))
                model.goes_on.set()
                base = await serve(model.play)
                async with httpx.AsyncClient(trust_env=False) as client:
                    reply = await client.post(base + url, json=body)
                assert reply.status_code == (529 if url == MESSAGES and status == 503 else status)
                assert reply.json()["error"]["message"]


@pytest.mark.parametrize("over_a_socket", [True, False])
async def test_an_error_after_the_head_is_an_event(serve, make_http, subtests, over_a_socket):
    async def answer(url: str) -> httpx.Response:
        model = Model(lambda start: failed(start, pb.CONTEXT_LENGTH_EXCEEDED, "too long"))
        model.first_s = 2 * HEAD_S
        model.goes_on.set()
        base = await serve(model.play) if over_a_socket else ""
        async with httpx.AsyncClient(trust_env=False) if base else make_http(model.play) as client:
            return await client.post(base + url, json=BODIES[url])

    found = await asyncio.gather(*map(answer, BODIES))
    for url, reply in zip(BODIES, found, strict=True):
        with subtests.test(url):
            assert reply.status_code == 200
            last = sent(reply.text)[-1]
            if url == RESPONSES:
                kinds = [event["type"] for event in sent(reply.text)]
                started = ["response.created", "response.in_progress"]
                assert kinds == [*started, "response.failed"]
                last = last["response"]
                assert last["error"]["code"] == "context_length_exceeded"
            assert "too long" in last["error"]["message"]
            assert "[DONE]" not in reply.text


PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
FUNCTION = {"name": "write_file", "description": "Write a text file.", "parameters": PARAMETERS}
TOOLS: dict[str, Any] = {
    CHAT: {"type": "function", "function": FUNCTION},
    RESPONSES: {"type": "function", **FUNCTION},
    MESSAGES: {"name": "write_file", "input_schema": PARAMETERS},
}


def _arguments_of(url: str, event: dict[str, Any]) -> str:
    """The piece of a call's arguments in an event."""
    if url == CHAT:
        calls = [call for c in event["choices"] for call in c["delta"].get("tool_calls", ())]
        return "".join(call["function"].get("arguments", "") for call in calls)
    if url == RESPONSES:
        return event["delta"] if event["type"] == "response.function_call_arguments.delta" else ""
    return event["delta"].get("partial_json", "") if event["type"] == "content_block_delta" else ""


@pytest.mark.extended
async def test_a_long_call_is_streamed_with_its_tokens(serve, tmp_path, subtests):
    """Stream a call of 2,500 characters at 10 ms per token of about three characters."""
    text = [{"role": "user", "content": "[[write long.txt]]"}]

    async def silences(url: str) -> tuple[list[float], str]:
        base = await serve(AgentModel(tmp_path / "notes", 8192, 0.01))
        body = {**BODIES[url], "model": NAME, "tools": [TOOLS[url]]}
        body |= {"input": text} if url == RESPONSES else {"messages": text}
        body |= {"max_tokens": 2000} if url == MESSAGES else {}
        written, pieces = [time.monotonic()], ""
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as client,
            client.stream("POST", base + url, json=body) as reply,
        ):
            async for line in reply.aiter_lines():
                piece = "".join(_arguments_of(url, event) for event in sent(line))
                if piece:
                    written.append(time.monotonic())
                    pieces += piece
        return [after - before for before, after in pairwise(written)], pieces

    found = await asyncio.gather(*map(silences, TOOLS))
    for url, (gaps, pieces) in zip(TOOLS, found, strict=True):
        with subtests.test(url):
            assert json.loads(pieces) == {"path": "long.txt", "content": LONG_TEXT}
            assert len(pieces) > 2500
            assert len(gaps) > len(pieces) / 10
            assert median(gaps) < 0.2


async def test_a_slow_prompt_delays_the_head(make_http):
    """Send no head while the prompt is checked, so that a late error keeps its status."""

    class Slow:
        def __init__(self) -> None:
            self.waited_s = 0.0

        async def check_text(self, owner: bytes) -> None:
            began = time.monotonic()
            await asyncio.sleep(2 * HEAD_S)
            self.waited_s += time.monotonic() - began

    slow = Slow()

    def arrange(service: Any) -> None:
        service.texts._rates = slow

    client = make_http(saying("x"), arrange=arrange)
    body = {"messages": [{"role": "user", "content": "a b " * 400}], "stream": True}
    reply = await client.post(CHAT, json=body)
    assert slow.waited_s > HEAD_S
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
