"""Fields of vLLM and related servers that constrain tokens or return them, on both routes."""

import asyncio
import gc
import json
from itertools import product
from typing import Any

import pytest
from fakes.router import FakeRouter, finished, logprob, saying, thinking_model, tokens
from oracles.grammar_walks import tokenizer
from oracles.http_errors import CHAT, HI, PLAIN, check

from pdserve.engine.api import MAX_BAD_WORD_CHARS
from pdserve.gateway import sampling
from pdserve.gateway.http.api import AT_ONCE
from pdserve.gateway.openai import objects
from pdserve.protos import common_pb2 as pb
from pdserve.text import ScoredToken

pytestmark = pytest.mark.anyio
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    PLAIN: {"model": "tiny", "prompt": "hello world"},
}
SCORED: dict[str, dict[str, Any]] = {CHAT: {"logprobs": True}, PLAIN: {"logprobs": 0}}


@pytest.mark.parametrize("url", BODIES)
async def test_bad_words_are_banned_after_a_space_and_without_one(make_http, url):
    router = FakeRouter(saying("x"))
    body = {**BODIES[url], "bad_words": ["hello", "  wor", "<|im_start|>", "hello"]}
    reply = await make_http(router).post(url, json=body)
    assert reply.status_code == 200, reply.json()
    found = [list(word.ids) for word in router.starts[0].params.bad_words]
    special = router.words.token_to_id("<|im_start|>")
    space = router.encode(" ")
    assert found == [
        router.encode("hello"), router.encode(" hello"), router.encode("wor"),
        router.encode(" wor"), [special], [*space, special],
    ]  # fmt: skip


@pytest.mark.parametrize("url", BODIES)
async def test_ids_reach_workers(make_http, url):
    router = FakeRouter(saying("x"))
    body = {**BODIES[url], **SCORED[url], "allowed_token_ids": [7, 3], "logprob_token_ids": [9, 4]}
    assert (await make_http(router).post(url, json=body)).status_code == 200
    assert list(router.starts[0].params.allowed_token_ids) == [7, 3]
    assert list(router.starts[0].params.logprob_token_ids) == [9, 4]


WRONG = [
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [1]}, "bad_words[0]"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x" * (MAX_BAD_WORD_CHARS + 1)]}, "bad_words"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["x"]}, "allowed_token_ids[0]"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"thinking_budget": -2}, "thinking_budget"),
    ({"thinking_token_budget": 2**31}, "thinking_token_budget"),
    ({"thinking_budget": 1, "reasoning_budget": 1}, "reasoning_budget"),
    ({"thinking_token_budget": 1, "thinking_budget": 1}, "thinking_budget"),
]


async def test_an_invalid_field_is_named(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for (fields, param), url in product(WRONG, BODIES):
        with subtests.test(fields=fields, url=url):
            router.starts.clear()
            check(await client.post(url, json={**BODIES[url], **fields}), 400, param)
            assert router.starts == []


async def test_a_thinking_budget(make_http, subtests):
    names = "thinking_token_budget", "thinking_budget", "reasoning_budget"
    for name, url in product(names, BODIES):
        with subtests.test(name=name, url=url):
            router = FakeRouter(saying("x"), *thinking_model())
            client = make_http(router)
            for budget in (5, 0, -1):
                reply = await client.post(url, json={**BODIES[url], name: budget})
                assert reply.status_code == 200
            five, none, free = (start.params for start in router.starts)
            assert five.thinking.max_tokens == 5
            assert list(five.thinking.start_ids) == router.encode("<think>")
            assert list(five.thinking.end_ids) == router.encode("</think>")
            assert none.HasField("thinking")
            assert none.thinking.max_tokens == 0
            assert not free.HasField("thinking")


async def test_a_thinking_budget_needs_a_reasoning_parser(make_http, subtests):
    client = make_http(saying("x"))
    for name, url in product(("thinking_token_budget", "reasoning_budget"), BODIES):
        with subtests.test(name=name, url=url):
            check(await client.post(url, json={**BODIES[url], name: 5}), 400, name)
            assert (await client.post(url, json={**BODIES[url], name: -1})).status_code == 200


async def test_thinking_may_begin_in_the_prompt(make_http):
    router = FakeRouter(saying("x"), *thinking_model())
    client = make_http(router)
    for prompt, begun in (
        ("a<think>\n", True),
        ("a<think>b", True),
        ("<think>x</think> a", False),
        ("<think>x</think> a <think>", True),
        ("a", False),
    ):
        body = {"model": "tiny", "prompt": prompt, "thinking_budget": 3}
        assert (await client.post(PLAIN, json=body)).status_code == 200
        thinking = router.starts[-1].params.thinking
        assert (list(thinking.start_ids) == []) == begun, prompt
        assert list(thinking.end_ids) == router.encode("</think>")


@pytest.mark.parametrize("url", BODIES)
async def test_log_probabilities_of_tokens_by_id(make_http, url):
    router = FakeRouter(saying("hello"))
    more = {"top_logprobs": 1} if url == CHAT else {"logprobs": 1}
    own = router.encode("hello")[0]
    request = {**BODIES[url], **SCORED[url], **more, "logprob_token_ids": [66, own, 67]}
    for as_ids in (False, True):
        body = {**request, "return_tokens_as_token_ids": as_ids}
        reply = await make_http(router).post(url, json=body)
        (choice,) = reply.json()["choices"]
        names = {
            token: f"token_id:{token}" if as_ids else text
            for token, text in ((own, "hello"), (66, router.words.decode([66])),
                                (67, router.words.decode([67])))
        }  # fmt: skip
        if url == CHAT:
            first = choice["logprobs"]["content"][0]
            assert first["token"] == names[own]
            assert bytes(first["bytes"]) == b"hello"
            scored = [(top["token"], top["logprob"]) for top in first["top_logprobs"]]
            assert scored == [(names[own], -9.0 - own), (names[66], -75.0), (names[67], -76.0)]
        else:
            assert choice["logprobs"]["tokens"][0] == names[own]
            assert set(choice["logprobs"]["top_logprobs"][0]) == set(names.values())


@pytest.mark.parametrize("url", BODIES)
async def test_log_probabilities_of_a_prompt(make_http, url):
    for count in (0, 2):
        router = FakeRouter(saying("x"))
        body = {**BODIES[url], "prompt_logprobs": count, "n": 2}
        reply = (await make_http(router).post(url, json=body)).json()
        (start,) = router.starts
        assert start.params.prompt_logprobs == count
        assert not start.params.HasField("logprobs")
        answers = [reply] if url == CHAT else reply["choices"]
        assert len(answers) == (1 if url == CHAT else 2)
        for answer in answers:
            first, *rest = answer["prompt_logprobs"]
            assert first is None
            assert len(rest) == len(start.prompt_ids) - 1
            for position, (token, entries) in enumerate(
                zip(start.prompt_ids[1:], rest, strict=True)
            ):
                own, *others = entries.items()
                assert own[0] == str(token)
                assert own[1]["logprob"] == logprob(position).logprob
                assert own[1]["decoded_token"] == router.words.decode([token], False)
                assert own[1].get("rank") == (1 if count else None)
                assert [entry["rank"] for _, entry in others] == list(range(2, count + 1))


async def test_log_probabilities_of_a_prompt_beside_its_echo(make_http):
    router = FakeRouter(saying("x"))
    body = {
        "model": "tiny", "prompt": ["hello world", "hello w"], "echo": True, "logprobs": 1,
        "prompt_logprobs": 3, "max_tokens": 1,
    }  # fmt: skip
    reply = (await make_http(router).post(PLAIN, json=body)).json()
    assert [start.params.prompt_logprobs for start in router.starts] == [3, 3]
    for choice, start in zip(reply["choices"], router.starts, strict=True):
        count = len(start.prompt_ids)
        assert len(choice["prompt_logprobs"]) == count
        assert len(choice["prompt_logprobs"][1]) == 3
        assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:count])
    body |= {"prompt": "a", "echo": False}
    (choice,) = (await make_http(router).post(PLAIN, json=body)).json()["choices"]
    assert choice["prompt_logprobs"] == [None], "a prompt of one token has no log-probabilities"


async def test_log_probabilities_of_a_long_prompt_do_not_block_the_loop():
    passes = 0

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    scores = [pb.TokenLogprob(logprob=-1.0)] * (8 * AT_ONCE)
    text = await objects.prompt_json(tokenizer(), [7] * (len(scores) + 1), scores, 0)
    counting.cancel()
    assert len(json.loads(text.text())) == len(scores) + 1
    assert passes >= 8


async def test_log_probabilities_written_in_parts_are_complete(make_http):
    router = FakeRouter(saying("x"))
    prompt = "hello world " * 3 * AT_ONCE
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1, "n": 2}
    whole = (await make_http(router).post(PLAIN, json=body)).json()["choices"]
    lines = (await make_http(router).post(PLAIN, json={**body, "stream": True})).text.splitlines()
    found: dict[int, list[Any]] = {0: [], 1: []}
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]].append(choice)
    for index, chunks in found.items():
        for name, values in whole[index]["logprobs"].items():
            assert len(values) > 3 * AT_ONCE
            assert values == [one for chunk in chunks for one in chunk["logprobs"][name]]
        assert prompt in chunks[0]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_prompts_are_bounded(make_http, monkeypatch, stream):
    router = FakeRouter(saying("x"))
    http = make_http(router)
    tokens = len(router.encode("hello world"))
    monkeypatch.setattr(objects, "MAX_LOGPROBS", 3 * 2 * tokens)
    body = {"model": "tiny", "prompt": "hello world", "echo": True, "logprobs": 1, "n": 3}
    assert (await http.post(PLAIN, json={**body, "stream": stream})).status_code == 200
    refused = await http.post(PLAIN, json={**body, "n": 4, "stream": stream})
    check(refused, 400, "logprobs")
    if not stream:
        body |= {"echo": False, "prompt_logprobs": 2}
        check(await http.post(PLAIN, json=body), 400, "prompt_logprobs")
        chat = {**BODIES[CHAT], "prompt_logprobs": 20}
        check(await http.post(CHAT, json=chat), 400, "prompt_logprobs")
    assert len(router.starts) == 1


@pytest.mark.parametrize(("url", "asks"), [(CHAT, {"top_logprobs": 5}), (PLAIN, {"logprobs": 5})])
async def test_a_whole_answer_stores_no_scored_tokens(make_http, url, asks):
    """Keep log-probabilities as text; objects would take several times the memory."""
    held = []

    async def play(router, start):
        for position in range(100):
            last = position == 99
            if last:
                held.append(sum(type(one) is ScoredToken for one in gc.get_objects()))
            yield tokens(start, [7], position, finish=pb.LENGTH if last else 0)
        yield finished(start)

    body = {**BODIES[url], **SCORED[url], **asks, "max_tokens": 100}
    (choice,) = (await make_http(play).post(url, json=body)).json()["choices"]
    assert len(choice["logprobs"]["content" if url == CHAT else "tokens"]) == 100
    assert held[0] < 10


@pytest.mark.parametrize(("url", "asks"), [(CHAT, {"top_logprobs": 4}), (PLAIN, {"logprobs": 4})])
async def test_log_probabilities_of_whole_answers_are_bounded(make_http, monkeypatch, url, asks):
    """Bound them by max_tokens, or as they are generated; streams hold none."""
    monkeypatch.setattr(sampling, "MAX_LOGPROBS", 3 * 10 * 5)
    router = FakeRouter(saying("hello " * 100))
    http = make_http(router)
    scored = {**BODIES[url], **SCORED[url], **asks, "n": 3}
    assert (await http.post(url, json={**scored, "max_tokens": 10})).status_code == 200
    for more in ({"max_tokens": 11}, {"max_tokens": 10, "logprob_token_ids": [9]}):
        error = check(await http.post(url, json={**scored, **more}), 400, "max_tokens")
        assert "request a stream, or fewer tokens" in error["message"]
    assert len(router.starts) == 1
    endless = {**scored, "max_tokens": None}
    assert check(await http.post(url, json=endless), 400, "max_tokens")["message"]
    assert len(router.left) == 1, "the request must end"
    assert (await http.post(url, json={**endless, "stream": True})).status_code == 200
    unscored = {**BODIES[url], "max_tokens": 100, "n": 3}
    assert (await http.post(url, json=unscored)).status_code == 200


async def test_a_short_whole_answer_is_accepted_in_a_large_context(make_http, monkeypatch):
    """Count only generated tokens if max_tokens is absent."""
    monkeypatch.setattr(sampling, "MAX_LOGPROBS", 200)
    body = {**BODIES[CHAT], **SCORED[CHAT], "top_logprobs": 20}
    assert (await make_http(saying("hello")).post(CHAT, json=body)).status_code == 200
