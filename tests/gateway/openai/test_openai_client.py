"""The official openai client against every endpoint and field, over a scripted router.

Over 400 lines: one client and one scripted model, which all tests share.
"""

import json
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any, Literal

import httpx2
import openai
import pytest
from fakes.router import FakeRouter, Play, failed, logprob, placed, saying, served, tokens
from oracles.grammar_walks import Walk
from pydantic import BaseModel, Field

from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def make_openai(make_app, anyio_backend) -> AsyncIterator[Callable[..., openai.AsyncOpenAI]]:
    clients: list[openai.AsyncOpenAI] = []

    def make(play: Play | FakeRouter, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        router = play if isinstance(play, FakeRouter) else FakeRouter(play)
        transport = httpx2.ASGITransport(make_app(router, **options))
        http = httpx2.AsyncClient(transport=transport)
        client = openai.AsyncOpenAI(
            api_key=key, base_url="http://gateway/v1", http_client=http, max_retries=0
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


async def test_chat(make_openai):
    answer = await make_openai(saying("hello world", cached=3)).chat.completions.create(
        model="tiny", messages=HI
    )
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.id.startswith("chatcmpl-")


class Address(BaseModel):
    zip: str = Field(pattern=r"^\d{5}$")


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    role: Literal["admin", "user"]
    home: Address | None
    friends: list["Person"]


async def test_an_answer_is_parsed_into_the_requested_class(make_openai):
    home = Address(zip="12345")
    ann = Person(name="Ann", age=8, role="admin", home=home, friends=[])
    ann.friends.append(Person(name="B", age=7, role="user", home=None, friends=[]))
    router = FakeRouter(saying(ann.model_dump_json()))
    chats = make_openai(router).chat.completions
    answer = await chats.parse(model="tiny", messages=HI, response_format=Person)
    assert answer.choices[0].message.parsed == ann
    source = router.starts[0].params.grammar.source
    assert Walk(source).take(ann.model_dump_json())
    for wrong in ('{"name":"Ann","age":151', '{"age"', '{"name":"A","age":8,"role":"x'):
        assert not Walk(source).take(wrong)


async def test_chat_stream_of_two_choices_with_usage(make_openai):
    stream = await make_openai(saying("hello", "world wide")).chat.completions.create(
        model="tiny", messages=HI, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts = {0: "", 1: ""}
    finishes: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
    assert texts == {0: "hello", 1: "world wide"}
    assert finishes == {0: "stop", 1: "stop"}
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_chat_logprobs(make_openai):
    answer = await make_openai(saying("hello w")).chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content[:2]] == ["hello", " w"]
    assert content[0].bytes == list(b"hello")
    assert [entry.logprob for entry in content] == [
        logprob(position).logprob for position in range(len(content))
    ]
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].top_logprobs[0].token == "hello"


async def test_every_sampling_field_reaches_the_router(make_openai):
    router = FakeRouter(saying("hello"))
    await make_openai(router).chat.completions.create(
        model="tiny", messages=HI, temperature=0.5, top_p=0.9, presence_penalty=0.25,
        frequency_penalty=-0.5, logit_bias={"7": -100}, seed=-1, max_completion_tokens=9, n=2,
        stop=["zzz"], user="u", metadata={"a": "b"}, store=False, service_tier="auto",
        response_format={"type": "text"}, parallel_tool_calls=True,
        extra_body={
            "top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5, "stop_token_ids": [3],
            "ignore_eos": True, "min_tokens": 2, "include_stop_str_in_output": True,
            "skip_special_tokens": False, "cache_salt": "mine", "an_unknown_field": 1,
        },
    )  # fmt: skip
    start = router.starts[0]
    p = start.params
    assert (p.temperature, p.top_p, p.presence_penalty, p.frequency_penalty) == (
        0.5, pytest.approx(0.9), 0.25, -0.5,
    )  # fmt: skip
    assert (p.top_k, p.min_p, p.repetition_penalty) == (4, 0.125, 1.5)
    assert (dict(p.logit_bias), list(p.stop_token_ids), p.ignore_eos) == ({7: -100}, [3], True)
    assert (p.min_tokens, p.max_tokens, p.n) == (2, 9, 2)
    assert start.seed == 2**64 - 1
    assert start.cache_salt == b"mine"


async def test_generation_config_fills_absent_fields(make_openai):
    recommended = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "max_tokens": 5}
    card, blobs = served(generation=recommended)
    router = FakeRouter(saying("hello"), [card], blobs)
    client = make_openai(router)
    await client.chat.completions.create(model="tiny", messages=HI, top_p=0.75)
    await client.completions.create(model="tiny", prompt="hi", temperature=0, max_tokens=3)
    chat, plain = (start.params for start in router.starts)
    assert (chat.temperature, chat.top_k, chat.top_p) == (0.25, 7, 0.75)
    assert (plain.temperature, plain.top_k, plain.top_p) == (0, 7, 0.5)
    assert plain.HasField("temperature")
    assert (chat.max_tokens, plain.max_tokens) == (5, 3)


async def test_an_absent_seed_is_drawn_for_each_request(make_openai):
    router = FakeRouter(saying("hello"))
    client = make_openai(router)
    for _ in range(2):
        await client.chat.completions.create(model="tiny", messages=HI)
    assert router.starts[0].seed != router.starts[1].seed


async def test_text_parts_roles_and_special_text(make_openai):
    router = FakeRouter(saying("hello"))
    messages: list[Any] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "<|im_end|>"},
    ]
    await make_openai(router).chat.completions.create(model="tiny", messages=messages)
    ids = list(router.starts[0].prompt_ids)
    assert ids.count(router.words.token_to_id("<|im_start|>")) == 5
    assert ids.count(router.eos) == 4  # special text written by the user is not counted
    assert "<|im_end|>" in router.words.decode(ids, skip_special_tokens=True)


async def test_stop_string_over_token_borders_cancels_decode(make_openai):
    router = FakeRouter(saying("hello world hello", "a b c d e f g"))
    answer = await make_openai(router).chat.completions.create(
        model="tiny", messages=HI, n=2, stop=["o wor"], logprobs=True
    )
    first, second = answer.choices
    assert first.message.content == "hell"
    assert first.finish_reason == "stop"
    assert second.message.content == "a b c d e f g"
    assert router.cancels == [(router.starts[0].request, (0,))]
    counted = len(router.encode("hello wor"))
    assert len(first.logprobs.content) == counted
    assert answer.usage.completion_tokens == counted + len(second.logprobs.content)
    assert router.left == []


async def test_stop_string_in_a_stream_is_never_shown(make_openai):
    router = FakeRouter(saying("hello world hello"))
    stream = await make_openai(router).chat.completions.create(
        model="tiny", messages=HI, stream=True, stop="world"
    )
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "hello "
    assert router.cancels


async def test_length(make_openai):
    answer = await make_openai(saying("hello world")).chat.completions.create(
        model="tiny", messages=HI, max_tokens=1
    )
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 1


async def test_first_token_is_eos(make_openai):
    answer = await make_openai(saying("")).chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_characters_are_never_split(make_openai, stream):
    text = "a👩‍👩‍👧 日本 é"  # every character takes several byte tokens
    client = make_openai(saying(text))
    if not stream:
        answer = await client.chat.completions.create(model="tiny", messages=HI)
        assert answer.choices[0].message.content == text
        return
    chunks = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    texts = [c.choices[0].delta.content or "" async for c in chunks]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


async def test_a_split_character_at_the_end_is_replaced(make_openai):
    answer = await make_openai(saying("é")).chat.completions.create(
        model="tiny", messages=HI, max_tokens=1
    )
    assert answer.choices[0].message.content == "\ufffd"


async def test_completion(make_openai):
    router = FakeRouter(saying(" world"))
    answer = await make_openai(router).completions.create(model="tiny", prompt="hello")
    assert answer.choices[0].text == " world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert list(router.starts[0].prompt_ids) == router.encode("hello")
    assert router.starts[0].params.max_tokens == 16


async def test_completion_of_several_prompts_and_choices(make_openai):
    router = FakeRouter(saying("hello", "world"))
    answer = await make_openai(router).completions.create(
        model="tiny", prompt=["hello", "hello hello", "x"], n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == ["hello", "world"] * 3
    assert len(router.starts) == 3
    assert answer.usage.prompt_tokens == sum(len(start.prompt_ids) for start in router.starts)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3], [4]]])
async def test_completion_of_token_ids(make_openai, prompt):
    router = FakeRouter(saying("hello"))
    await make_openai(router).completions.create(model="tiny", prompt=prompt)
    wanted = prompt if isinstance(prompt[0], list) else [prompt]
    assert [list(start.prompt_ids) for start in router.starts] == wanted


async def test_completion_stream(make_openai):
    stream = await make_openai(saying("hello world", "hell")).completions.create(
        model="tiny", prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}
    )
    texts = dict.fromkeys(range(4), "")
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "hello world", 1: "hell", 2: "hello world", 3: "hell"}
    assert usage is not None
    assert usage.prompt_tokens == 2


async def test_echo_with_logprobs(make_openai):
    router = FakeRouter(saying(" world"))
    answer = await make_openai(router).completions.create(
        model="tiny", prompt="hello hello", echo=True, logprobs=2
    )
    choice = answer.choices[0]
    prompt_len = len(router.starts[0].prompt_ids)
    assert choice.text == "hello hello world"
    scores = choice.logprobs
    assert len(scores.tokens) == prompt_len + answer.usage.completion_tokens
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert scores.token_logprobs[1] == logprob(0).logprob
    assert all(len(top) >= 2 for top in scores.top_logprobs[1:])
    for token, offset in zip(scores.tokens[:-1], scores.text_offset, strict=False):
        assert choice.text[offset:].startswith(token)


async def test_echo_without_generation_scores_the_prompt(make_openai):
    router = FakeRouter(saying(" world"))
    answer = await make_openai(router).completions.create(
        model="tiny", prompt="hello hello", echo=True, logprobs=0, max_tokens=0
    )
    assert answer.choices[0].text == "hello hello"
    assert len(answer.choices[0].logprobs.tokens) == len(router.starts[0].prompt_ids)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert router.starts[0].params.max_tokens == 1


async def test_echo_in_a_stream(make_openai):
    stream = await make_openai(saying(" world")).completions.create(
        model="tiny", prompt="hello", echo=True, stream=True, n=2
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "hello world", 1: "hello world"}


async def test_best_of_returns_the_most_likely(make_openai):
    router = FakeRouter(saying("hello", "world", "x"))
    answer = await make_openai(router).completions.create(model="tiny", prompt="a", best_of=3, n=2)
    # The fake's log-probabilities fall with position: the shortest has the best mean.
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == "hello"
    assert router.starts[0].params.n == 3
    assert answer.choices[0].logprobs is None
    returned = sum(len(router.encode(choice.text)) + 1 for choice in answer.choices)
    assert answer.usage.completion_tokens == returned


async def test_stop_token_ids_are_not_text_by_default(make_openai):
    router = FakeRouter(saying("hello world"))
    client = make_openai(router)
    stop_id = router.encode(" w")[0]
    for include, text in ((False, "hello"), (True, "hello w")):
        answer = await client.completions.create(
            model="tiny", prompt="a",
            extra_body={"stop_token_ids": [stop_id], "include_stop_str_in_output": include},
        )  # fmt: skip
        assert answer.choices[0].text == text
        assert answer.choices[0].finish_reason == "stop"


async def test_models(make_openai):
    card, blobs = served(name="org/tiny model")
    client = make_openai(FakeRouter(saying("hello"), [card], blobs))
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["org/tiny model"]
    model = await client.models.retrieve("org/tiny model")
    assert (model.id, model.object, model.created) == ("org/tiny model", "model", 1700000000)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_api_keys(make_openai):
    router = FakeRouter(saying("hello"))
    with pytest.raises(openai.AuthenticationError) as caught:
        await make_openai(router, "wrong", keys=("right", "other")).models.list()
    assert caught.value.code == "invalid_api_key"
    assert (await make_openai(router, "right", keys=("right", "other")).models.list()).data


FAILURES = [
    (pb.OVERLOADED, 429, openai.RateLimitError),
    (pb.UNAVAILABLE, 503, openai.InternalServerError),
    (pb.QUEUE_TIMEOUT, 503, openai.InternalServerError),
    (pb.DEADLINE_EXCEEDED, 504, openai.InternalServerError),
    (pb.POISON_REQUEST, 500, openai.InternalServerError),
    (pb.MODEL_NOT_FOUND, 404, openai.NotFoundError),
]


async def test_failures_before_the_first_token(make_openai, subtests):
    for (code, status, error), stream in product(FAILURES, (False, True)):
        with subtests.test(code=pb.ErrorCode.Name(code), stream=stream):

            async def play(router, start, code=code):
                yield placed(start)
                yield failed(start, code, "because", retry_after_ms=1500)

            with pytest.raises(error) as caught:
                await make_openai(play).chat.completions.create(
                    model="tiny", messages=HI, stream=stream
                )
            assert caught.value.status_code == status
            assert caught.value.body["message"] == "because"
            retry = caught.value.response.headers.get("retry-after")
            assert retry == ("2" if status in (429, 503) else None)


async def test_failure_in_the_middle_of_a_stream(make_openai):
    async def play(router, start):
        yield tokens(start, router.encode("hello"), 0)
        yield failed(start, pb.POISON_REQUEST, "two workers died")

    stream = await make_openai(play).chat.completions.create(model="tiny", messages=HI, stream=True)
    seen: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="two workers died"):
        await read()
    assert "".join(seen) == "hello"


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.role + ':' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{# </think> #}assistant:"
)
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_with_tools(make_openai, streamed):
    """The model calls a tool, the client answers, the model makes two more calls, then replies."""
    card, blobs = served()
    blobs[card.template_digest] = TOOL_TEMPLATE.encode()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": NUMBER}}\n</tool_call>'
    lines = [
        "<think>first</think>Let me see. " + call.replace("NUMBER", "1"),
        call.replace("NUMBER", "2") + call.replace("NUMBER", "3"),
        "Six.",
    ]
    router = FakeRouter(saying(""), [card], blobs)
    client = make_openai(router)
    messages: list[Any] = [*HI]
    answered = []
    for line in lines:
        router.play = saying(line)
        message = await _message(client, messages, streamed)
        messages.append(message)
        for one in message.get("tool_calls") or []:
            numbers = json.loads(one["function"]["arguments"])
            answered.append(numbers["a"])
            messages.append(
                {"role": "tool", "tool_call_id": one["id"], "content": str(sum(answered))}
            )
    assert answered == [1, 2, 3]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == [
        "Let me see.", None, "Six.",
    ]  # fmt: skip
    prompt = router.words.decode(list(router.starts[-1].prompt_ids), skip_special_tokens=False)
    assert "\ntool:3\ntool:6\nassistant:" in prompt


async def _message(client, messages: list[Any], streamed: bool) -> dict[str, Any]:
    """The assistant's next message, as a client sends it back in the conversation."""
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": [ADD]}
    if not streamed:
        answer = await client.chat.completions.create(**body)
        choice = answer.choices[0]
        message = choice.message
        assert choice.finish_reason == ("tool_calls" if message.tool_calls else "stop")
        return message.model_dump(include={"role", "content", "tool_calls"})
    async with client.chat.completions.stream(**body) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
    calls = [
        {
            "id": one.id,
            "type": "function",
            "function": {"name": one.function.name, "arguments": one.function.arguments},
        }
        for one in message.tool_calls or []
    ]
    return {"role": "assistant", "content": message.content or None, "tool_calls": calls}
