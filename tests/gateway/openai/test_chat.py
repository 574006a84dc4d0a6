"""/v1/chat/completions against a scripted router."""

import pytest
from fakes.router import FakeRouter, finished, placed, saying, served, tokens
from oracles.sse import events

from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def test_whole_answer(make_http):
    router = FakeRouter(saying("hello world", cached=4))
    reply = await make_http(router).post(URL, json={"model": "tiny", "messages": HI})
    body = reply.json()
    assert reply.status_code == 200, body
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    start = router.starts[0]
    generated = len(router.encode("hello world")) + 1
    assert body["usage"] == {
        "prompt_tokens": len(start.prompt_ids),
        "completion_tokens": generated,
        "total_tokens": len(start.prompt_ids) + generated,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "pdserve": {"inexact": False},
    }
    assert start.params.max_tokens == 0  # 0: the engine uses the rest of the context
    assert start.remaining_ms > 590_000
    assert 0 < start.queue_remaining_ms <= 60_000


async def test_a_messages_name_reaches_the_template(make_http):
    card, blobs = served()
    blobs[card.template_digest] = b"{% for m in messages %}{{ m.name or m.role }}: {% endfor %}"
    router = FakeRouter(saying("x"), [card], blobs)
    messages = [{"role": "user", "content": "hi", "name": "hello"}, *HI]
    reply = await make_http(router).post(URL, json={"model": "tiny", "messages": messages})
    assert reply.status_code == 200, reply.json()
    assert list(router.starts[0].prompt_ids) == router.encode("hello: user: ")


@pytest.mark.parametrize("url", [URL, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_inexact_answer_is_marked(make_http, url, stream):
    async def play(router, start):
        yield placed(start)
        yield tokens(start, router.encode("hello"), 0, finish=pb.STOP)
        yield finished(start, inexact=True)

    body = {"model": "tiny", "stream": stream}
    body |= {"model": "tiny", "messages": HI} if url == URL else {"model": "tiny", "prompt": "x"}
    if stream:
        body["stream_options"] = {"include_usage": True}
    reply = await make_http(play).post(url, json=body)
    last = events(reply.text)[-1] if stream else reply.json()
    assert last["usage"]["pdserve"] == {"inexact": True}


async def test_stream(make_http):
    client = make_http(saying("hello world"))
    body = {
        "model": "tiny", "messages": HI, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    reply = await client.post(URL, json=body)
    chunks = events(reply.text)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == "hello world"
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
