"""Known fields that are not served are refused by name or ignored on purpose; served fields take
effect."""

from typing import Any

import pytest
from fakes.router import FakeRouter, saying, served
from oracles.http_errors import CHAT, HI, PLAIN, check
from oracles.sse import events

from pdserve.gateway.http.fields import FIELD_ALIASES, IGNORED_FIELDS, REFUSED_FIELDS
from pdserve.gateway.openai.request_models import ChatBody, CompletionBody

pytestmark = pytest.mark.anyio
BODIES = {
    CHAT: ({"model": "tiny", "messages": HI}, ChatBody),
    PLAIN: ({"model": "tiny", "prompt": "a"}, CompletionBody),
}
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # one non-default value of each type


@pytest.mark.parametrize("url", BODIES)
async def test_unsupported_fields_are_refused_by_name(make_http, url):
    body, kind = BODIES[url]
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for name in (
        (REFUSED_FIELDS.keys() | FIELD_ALIASES.keys()) - kind.model_fields.keys() - body.keys()
    ):
        for value in WANTED:
            if value in REFUSED_FIELDS.get(name, ()):
                continue
            error = check(await client.post(url, json={**body, name: value}), 400, name)
            assert error["message"].startswith(f"{name} is not ")
        instead = FIELD_ALIASES.get(name)
        if instead in kind.model_fields:
            assert f"use {instead}" in error["message"]
    assert router.starts == []


@pytest.mark.parametrize("url", BODIES)
async def test_no_op_values_of_unsupported_fields_are_accepted(make_http, url):
    body, kind = BODIES[url]
    router = FakeRouter(saying("x"))
    client = make_http(router)
    count = max(map(len, REFUSED_FIELDS.values()))
    for number in range(count):
        given = {
            name: nothing[min(number, len(nothing) - 1)]
            for name, nothing in REFUSED_FIELDS.items()
            if name not in kind.model_fields and name not in body
        }
        reply = await client.post(url, json={**body, **given, **dict.fromkeys(IGNORED_FIELDS, "x")})
        assert reply.status_code == 200, reply.json()
    assert len(router.starts) == count


# Fields that vLLM, SGLang, llama.cpp and others accept beside OpenAI's, and this server does not.
NAMED = (
    "continue_final_message", "echo", "prompt_token_ids", "prompt_logprobs", "best_of", "documents",
    "return_tokens_as_token_ids", "allowed_token_ids", "bad_words", "grammar", "json_schema",
    "regex", "ebnf", "structural_tag", "stop_regex", "n_predict", "max_new_tokens", "thinking",
    "enable_thinking", "thinking_budget", "reasoning", "tools", "response_format", "prediction",
    "truncation_side", "random_seed", "no_repeat_ngram_size", "num_beams", "repeat_last_n",
    "length_penalty", "mirostat", "typical_p", "dry_multiplier", "xtc_probability", "store", "user",
    "metadata",
)  # fmt: skip


def test_every_known_field_is_listed() -> None:
    placed = REFUSED_FIELDS.keys() | FIELD_ALIASES.keys() | IGNORED_FIELDS
    assert set(NAMED) <= placed | ChatBody.model_fields.keys()
    assert set(NAMED) <= placed | CompletionBody.model_fields.keys()


def test_each_field_is_in_one_list() -> None:
    assert not IGNORED_FIELDS & REFUSED_FIELDS.keys()
    for _, kind in BODIES.values():
        assert not IGNORED_FIELDS & kind.model_fields.keys()


async def test_every_invalid_key_of_logit_bias_is_named(make_http):
    client = make_http(saying("x"))
    for biases, end in (
        ({"a": 1, "-1": 1, "3": 1}, "'a', '-1' are not token ids"),
        ({"3": 1, "99998": 1, "99999": 1}, "99998, 99999"),
        ({"3": 101, "4": 1, "5": -101}, "3, 5"),
    ):
        reply = await client.post(
            CHAT, json={"model": "tiny", "messages": HI, "logit_bias": biases}
        )
        assert check(reply, 400, "logit_bias")["message"].endswith(end)


def templated(source: str) -> FakeRouter:
    card, blobs = served()
    blobs[card.template_digest] = source.encode()
    return FakeRouter(saying("hello"), [card], blobs)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "hi."),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "hi. thinking False"),
        ({"reasoning_effort": "low"}, "hi. effort low"),
        ({"reasoning_effort": "none"}, "hi. effort none thinking False"),
        ({"verbosity": "high"}, "hi. verbosity high"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "hi. effort high",
        ),
        ({"add_generation_prompt": False}, "hi"),
    ],
)
async def test_fields_passed_to_the_template(make_http, fields, text):
    router = templated(
        "{{ messages[0].content }}{% if add_generation_prompt %}.{% endif %}"
        "{% if reasoning_effort is defined %} effort {{ reasoning_effort }}{% endif %}"
        "{% if enable_thinking is defined %} thinking {{ enable_thinking }}{% endif %}"
        "{% if verbosity is defined %} verbosity {{ verbosity }}{% endif %}"
    )
    reply = await make_http(router).post(CHAT, json={"model": "tiny", "messages": HI, **fields})
    assert reply.status_code == 200, reply.json()
    assert list(router.starts[0].prompt_ids) == router.encode(text)


async def test_an_effort_is_accepted_where_templates_get_none(make_app, make_http):
    router = templated("{{ messages[0].content }}")
    client = make_http(router, template_kwargs=())
    reply = await client.post(
        CHAT, json={"model": "tiny", "messages": HI, "reasoning_effort": "none"}
    )
    assert reply.status_code == 200, reply.json()
    body = {"model": "tiny", "messages": HI, "chat_template_kwargs": {"reasoning_effort": "none"}}
    check(await client.post(CHAT, json=body), 400, "chat_template_kwargs.reasoning_effort")


async def test_template_kwargs_outside_the_allowlist_are_refused(make_http):
    router = templated("{{ messages[0].content }}")
    for name in ("messages", "tools", "bos_token", "date_string"):
        body = {"model": "tiny", "messages": HI, "chat_template_kwargs": {name: "x"}}
        param = f"chat_template_kwargs.{name}"
        error = check(await make_http(router).post(CHAT, json=body), 400, param)
        assert "enable_thinking" in error["message"]
    assert router.starts == []


async def test_a_last_message_is_continued(make_http):
    router = templated("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ 'x' * 3 }}")
    turns = [*HI, {"role": "assistant", "content": "hello"}]
    body = {"model": "tiny", "messages": turns, "continue_final_message": True}
    assert (await make_http(router).post(CHAT, json=body)).status_code == 200
    assert list(router.starts[0].prompt_ids) == router.encode("[hi][hello")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for wrong in (
        {"model": "tiny", "messages": HI},
        {"add_generation_prompt": True},
        {"model": "tiny", "messages": [*HI, {**turns[-1], "tool_calls": calls}]},
    ):
        reply = await make_http(router).post(CHAT, json=body | wrong)
        check(reply, 400, "continue_final_message")


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned(make_http, url, stream):
    router = FakeRouter(saying("hello world", "hello"))
    body = {**BODIES[url][0], "n": 2, "return_token_ids": True, "stream": stream}
    reply = await make_http(router).post(url, json=body)
    (start,) = router.starts
    found: dict[int, list[int]] = {0: [], 1: []}
    prompts: list[Any] = []
    for part in events(reply.text) if stream else [reply.json()]:
        prompts += [part["prompt_token_ids"]] if "prompt_token_ids" in part else []
        for choice in part["choices"]:
            found[choice["index"]] += choice.get("token_ids", [])
            prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    for number, text in enumerate(("hello world", "hello")):
        ids = router.encode(text)
        assert found[number][: len(ids)] == ids
        assert len(found[number]) == len(ids) + 1, "the end-of-sequence token must be included"
    assert prompts
    assert all(ids == list(start.prompt_ids) for ids in prompts)


@pytest.mark.parametrize("ids", [[5, 6, 7], [[5, 6, 7], [8]]])
async def test_prompt_token_ids_is_another_name_of_prompt(make_http, ids):
    router = FakeRouter(saying("hello"))
    client = make_http(router)
    for name in ("prompt", "prompt_token_ids"):
        reply = await client.post(PLAIN, json={"model": "tiny", name: ids, "echo": True})
        assert reply.status_code == 200, reply.text
    prompts = [list(start.prompt_ids) for start in router.starts]
    wanted = ids if isinstance(ids[0], list) else [ids]
    assert sorted(prompts) == sorted([*wanted, *wanted])
    body = {"model": "tiny", "messages": HI, "prompt_token_ids": ids}
    assert (
        "use" not in check(await client.post(CHAT, json=body), 400, "prompt_token_ids")["message"]
    )


@pytest.mark.parametrize("url", BODIES)
async def test_a_priority_is_sent_with_every_prompt_and_choice(make_http, url):
    router = FakeRouter(saying("hello"))
    client = make_http(router)
    more = {"prompt": ["a", "b"]} if url == PLAIN else {"n": 2}
    for value, wanted in ((-(2**31), -(2**31)), (2**31 - 1, 2**31 - 1), (None, 0)):
        router.starts.clear()
        body = {**BODIES[url][0], **more, "priority": value}
        assert (await client.post(url, json=body)).status_code == 200
        assert {start.priority for start in router.starts} == {wanted}


async def test_ids_of_withheld_text_are_returned_with_the_next_text(make_http):
    """Withheld text: part of a character of several tokens, or a possible start of a stop
    string."""
    router = FakeRouter(saying("hé世 world"))
    body = {
        "model": "tiny",
        "prompt": "a",
        "return_token_ids": True,
        "stream": True,
        "stop": ["never", "wor "],
    }
    parts = events((await make_http(router).post(PLAIN, json=body)).text)
    found = [token for part in parts for token in part["choices"][0]["token_ids"]]
    ids = router.encode("hé世 world")
    assert len(parts) < len(ids)
    assert found[:-1] == ids


async def test_a_prompt_is_truncated_from_its_beginning(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for kept, expected in ((3, [5, 6, 7]), (7, range(1, 8)), (9, range(1, 8)), (-1, range(1, 8))):
        body = {
            "model": "tiny",
            "prompt": list(range(1, 8)),
            "max_tokens": 4,
            "truncate_prompt_tokens": kept,
        }
        assert (await client.post(PLAIN, json=body)).status_code == 200
        assert list(router.starts[-1].prompt_ids) == list(expected)
    body = {"model": "tiny", "prompt": [1] * 600, "max_tokens": 12, "truncate_prompt_tokens": -1}
    assert (await client.post(PLAIN, json=body)).status_code == 200
    assert len(router.starts[-1].prompt_ids) == 500
    text = {
        "model": "tiny",
        "prompt": "hello world hello",
        "echo": True,
        "truncate_prompt_tokens": 2,
    }
    reply = await client.post(PLAIN, json={**text, "max_tokens": 0, "logprobs": 0})
    (choice,) = reply.json()["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert "hello world hello".endswith(choice["text"])
    assert 0 < len(choice["text"]) < 10
    for more in ({}, {"truncate_prompt_tokens": 2}):
        assert (
            await client.post(CHAT, json={"model": "tiny", "messages": HI, **more})
        ).status_code == 200
    assert router.starts[-1].prompt_ids == router.starts[-2].prompt_ids[-2:]


@pytest.mark.parametrize("url", BODIES)
async def test_usage_in_every_chunk(make_http, url):
    body = {
        **BODIES[url][0], "n": 2, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    router = FakeRouter(saying("hello world", "hello"))
    *chunks, last = events((await make_http(router).post(url, json=body)).text)
    usages = [chunk["usage"] for chunk in chunks]
    prompt_tokens = len(router.starts[0].prompt_ids)
    assert all(usage["prompt_tokens"] == prompt_tokens for usage in usages)
    counted = [usage["completion_tokens"] for usage in usages]
    assert counted == sorted(counted)
    assert len(set(counted)) > 2
    assert counted[-1] == last["usage"]["completion_tokens"]
    assert all(u["total_tokens"] == prompt_tokens + u["completion_tokens"] for u in usages)
