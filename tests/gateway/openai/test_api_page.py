"""docs/api.md says what the code knows, and each of its rows is true of a running application."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from api_page import IGNORED, REFUSED, ROUTES, SERVED, page
from fake_router import FakeRouter, saying
from http_errors import CHAT, HI, PLAIN, check

pytestmark = pytest.mark.anyio
PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    PLAIN: {"model": "tiny", "prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}
# A value of each served field, with what it needs beside it.
GIVEN: dict[str, dict[str, Any]] = {
    "model": {"model": "tiny"},
    "messages": {"messages": HI},
    "prompt": {"prompt": [1, 2]},
    "tokens": {"tokens": [3]},
    "n": {"n": 2},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": -1.0},
    "frequency_penalty": {"frequency_penalty": 1},
    "logit_bias": {"logit_bias": {"3": 1}},
    "seed": {"seed": 7},
    "stop": {"stop": ["x"]},
    "stop_token_ids": {"stop_token_ids": [3]},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 2},
    "max_tokens": {"max_tokens": 5},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "cache_salt": {"cache_salt": "salt"},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
    "return_token_ids": {"return_token_ids": True},
    "return_token_strs": {"return_token_strs": True},
    "add_generation_prompt": {"messages": HI, "add_generation_prompt": False},
    "continue_final_message": {
        "messages": [*HI, {"role": "assistant", "content": "x"}], "continue_final_message": True
    },
    "add_special_tokens": {"add_special_tokens": False},
    "chat_template_kwargs": {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
    "reasoning_effort": {"messages": HI, "reasoning_effort": "low"},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "best_of": {"best_of": 2},
    "echo": {"echo": True},
}  # fmt: skip
OWN = {  # where a route has another value
    (PLAIN, "logprobs"): {"logprobs": 2},
    ("/tokenize", "prompt"): {"prompt": "x"},
}
WRONG = ({"x": {"x": []}}, 0.5, "x")  # no field takes all of them
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # of each kind one


def rows(path: str, what: str) -> dict[str, str]:
    """The field and the value of the rows of a route that say so."""
    (table,) = re.findall(rf"^## POST {path}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^\| `(\w+)` \| ?(.*?) \| (\w+)(?:;.*)? \|$", table, re.MULTILINE)
    return {name: value for name, value, here in found if here == what}


def test_the_page_is_as_the_code() -> None:
    assert page() == PAGE, "`make docs` writes docs/api.md anew"
    assert {route.path for route in ROUTES} >= LEAST.keys()


@pytest.mark.parametrize("path", LEAST)
async def test_what_is_served_is_taken(make_http, path):
    client = make_http(FakeRouter(saying("hello world")))
    served = rows(path, SERVED)
    assert served
    for name in served:
        given = OWN.get((path, name), GIVEN[name])
        body = {**LEAST[path], **given}
        if "messages" in given:
            body.pop("prompt", None)
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, (name, reply.text)
        wrong = [await client.post(path, json={**body, name: value}) for value in WRONG]
        assert 400 in {reply.status_code for reply in wrong}, f"{name} is not looked at"


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_what_is_ignored_changes_no_answer(make_http, path):
    router = FakeRouter(saying("hello world"))
    client = make_http(router)

    async def asked(**more: Any) -> tuple[Any, bytes]:
        body = {**LEAST[path], "seed": 1, **more}
        answer = (await client.post(path, json=body)).json()
        del answer["id"], answer["created"]
        return answer, router.starts[-1].params.SerializeToString(deterministic=True)

    plain = await asked()
    ignored = rows(path, IGNORED)
    assert len(ignored) > 20
    for name in ignored:
        for value in WANTED:
            assert await asked(**{name: value}) == plain, name


@pytest.mark.parametrize("path", LEAST)
async def test_what_is_refused_is_named(make_http, path):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    refused = rows(path, REFUSED)
    assert refused
    for name, value in refused.items():
        taken = [json.loads(word) for word in re.findall(r"`(.*?)`", value)]
        for wanted in WANTED:
            if wanted not in taken:
                reply = await client.post(path, json={**LEAST[path], name: wanted})
                check(reply, 400, name)
        for nothing in (None, *taken):
            reply = await client.post(path, json={**LEAST[path], name: nothing})
            assert reply.status_code == 200, (name, nothing, reply.text)
