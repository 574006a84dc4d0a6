"""The official ollama client against the gateway, over a socket."""

from collections.abc import Callable
from functools import partial
from typing import Any

import ollama
import pytest
from fakes.router import FakeRouter, saying
from fakes.scripted_parts import ScriptedParts, deltas
from ollama import _types
from systems.served_gateway import every_kind

from pdserve.gateway.ollama.request_models import (
    IGNORED_FIELDS,
    IGNORED_OPTIONS,
    REFUSED_FIELDS,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    OllamaShowBody,
)
from pdserve.text import ReasoningPart, TextPart, ToolCallPart

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
CALL = deltas(
    ReasoningPart("hm"),
    TextPart("Look."),
    ToolCallPart(0, "call_a", "weather", '{"place": "Rome"}'),
    finish="tool_calls",
)


def weather(place: str) -> str:
    """The weather of a place.

    Args:
        place: its name
    """
    return place


@pytest.fixture
def connect(connect_to) -> Callable[..., Any]:
    return partial(connect_to, ollama.AsyncClient)


def test_every_field_of_the_client_is_served_ignored_or_refused() -> None:
    for sent, body in (
        (_types.ChatRequest, OllamaChatBody),
        (_types.GenerateRequest, OllamaGenerateBody),
        (_types.EmbedRequest, OllamaEmbedBody),
        (_types.EmbeddingsRequest, OllamaEmbeddingsBody),
        (_types.ShowRequest, OllamaShowBody),
        (_types.Message, OllamaMessage),
    ):
        assert (
            sent.model_fields.keys()
            <= body.model_fields.keys() | IGNORED_FIELDS | REFUSED_FIELDS.keys()
        )
    known = OllamaOptions.model_fields.keys() | IGNORED_OPTIONS | REFUSED_FIELDS.keys()
    assert ollama.Options.model_fields.keys() <= known


async def test_a_chat_whole_and_streamed(connect):
    router = FakeRouter(saying("hello world"))
    client = await connect(router)
    options = ollama.Options(temperature=0.5, num_ctx=4096, num_predict=20, stop=["!"])
    whole = await client.chat("tiny:latest", HI, options=options, keep_alive="5m")
    assert whole.message.content == "hello world"
    assert (whole.done, whole.done_reason) == (True, "stop")
    parts = [part async for part in await client.chat("tiny", HI, stream=True, options=options)]
    assert "".join(part.message.content for part in parts) == "hello world"
    assert parts[-1].eval_count == whole.eval_count
    made = await client.generate("tiny", "hi", system="be short")
    assert made.response == "hello world"
    assert router.starts[0].params.temperature == 0.5


async def test_a_tool_loop_with_thinking(connect):
    parts = ScriptedParts(CALL, deltas(TextPart("Warm.")))
    client = await connect(parts)
    messages: list[Any] = [*HI]
    answer = await client.chat("tiny", messages, tools=[weather], think=True)
    assert (answer.message.thinking, answer.message.content) == ("hm", "Look.")
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"place": "Rome"})
    messages += [
        answer.message,
        {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)},
    ]
    answer = await client.chat("tiny", messages, tools=[weather])
    assert answer.message.content == "Warm."
    _, turn, result = parts.messages()
    assert turn["reasoning_content"] == "hm"
    assert result["tool_call_id"] == turn["tool_calls"][0]["id"]


async def test_models_and_embeddings(connect):
    client = await connect(every_kind())
    assert [model.model for model in (await client.list()).models] == [
        "embedder", "reranker", "tiny",
    ]  # fmt: skip
    assert [model.model for model in (await client.ps()).models][-1] == "tiny"
    shown = await client.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    vectors = await client.embed("embedder", ["a", "b"])
    assert len(vectors.embeddings) == 2
    assert len((await client.embeddings("embedder", "a")).embedding) == len(vectors.embeddings[0])


async def test_errors(connect):
    client = await connect(ScriptedParts([*CALL[:1], RuntimeError("broken")]))
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        await client.chat("none", HI)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="internal server error"):
        async for _ in await client.chat("tiny", HI, stream=True):
            pass
    with pytest.raises(ollama.ResponseError, match="not offered"):
        await client.pull("tiny")
