"""docs/api.md says what the code knows, and each of its rows is true of a running application."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from api_page import IGNORED, REFUSED, ROUTES, SERVED, page
from fake_router import FakeRouter
from http_errors import CHAT, HI, LARGE, PLAIN
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from scripted_parts import MemoryStore
from served_gateway import every_kind, served_gateway
from tool_model import THINKING

pytestmark = pytest.mark.anyio
PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, FILES, BATCHES = "/v1/embeddings", "/v1/files", "/v1/batches"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    PLAIN: {"model": "tiny", "prompt": "hello"},
    RESPONSES: {"model": "tiny", "input": "hello"},
    EMBEDDINGS: {"model": "embedder", "input": "hello"},
    "/rerank": {"model": "reranker", "query": "a", "documents": ["b", "c"]},
    "/score": {"model": "reranker", "text_1": "a", "text_2": ["b", "c"]},
    MESSAGES: {"model": "tiny", "messages": HI, "max_tokens": 5},
    COUNT: {"model": "tiny", "messages": HI},
    "/tokenize": {"model": "tiny", "prompt": "hello"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
}
# What each client's package can send.
KNOWN_TO_CLIENTS: dict[str, Any] = {
    CHAT: chat_create_params.CompletionCreateParamsStreaming,
    PLAIN: completion_create_params.CompletionCreateParamsStreaming,
    RESPONSES: response_create_params.ResponseCreateParamsStreaming,
    EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
    MESSAGES: message_create_params.MessageCreateParamsStreaming,
    COUNT: message_count_tokens_params.MessageCountTokensParams,
    FILES: file_create_params.FileCreateParams,
    BATCHES: batch_create_params.BatchCreateParams,
}
SCHEMA = {"type": "object"}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
LOGPROBS = "message.output_text.logprobs"
# A value of each served field, with what it needs beside it.
GIVEN: dict[str, dict[str, Any]] = {
    "model": {"model": "tiny"},
    "messages": {"messages": HI},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_regex": {"guided_regex": "a"},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": 'root ::= "a"'},
    "regex": {"regex": "a"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "json_schema": {"json_schema": SCHEMA},
    "grammar": {"grammar": 'root ::= "a"'},
    "structural_tag": {"structural_tag": {"structures": [TAG], "triggers": ["<"]}},
    "allowed_token_ids": {"allowed_token_ids": [3]},
    "bad_words": {"bad_words": ["x"]},
    "logprob_token_ids": {"logprobs": True, "logprob_token_ids": [3]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "return_tokens_as_token_ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "thinking_token_budget": {"thinking_token_budget": 3},
    "thinking_budget": {"thinking_budget": 3},
    "reasoning_budget": {"reasoning_budget": 3},
    "session_id": {"session_id": "s"},
    "user": {"user": "u"},
    "tools": {"messages": HI, "tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "auto"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "include_reasoning": {"include_reasoning": False},
    "separate_reasoning": {"separate_reasoning": False},
    "input": {"input": "x"},
    "instructions": {"instructions": "be kind"},
    "previous_response_id": {},  # there is one when it is asked for
    "store": {"store": False},
    "include": {"include": [LOGPROBS]},
    "max_output_tokens": {"max_output_tokens": 5},
    "max_tool_calls": {"max_tool_calls": 1},
    "text": {"text": {"format": {"type": "json_object"}}},
    "reasoning": {"reasoning": {"effort": "low"}},
    "metadata": {"metadata": {"a": "b"}},
    "safety_identifier": {"safety_identifier": "x"},
    "prompt_cache_key": {"prompt_cache_key": "x"},
    "encoding_format": {"encoding_format": "base64"},
    "dimensions": {"dimensions": 2},
    "normalize": {"normalize": True},
    "embed_dtype": {"embed_dtype": "float32"},
    "endianness": {"endianness": "little"},
    "instruction": {"instruction": "judge"},
    "use_activation": {"use_activation": True},
    "activation": {"activation": True},
    "softmax": {"softmax": True},
    "query": {"query": "x"},
    "documents": {"documents": ["x"]},
    "top_n": {"top_n": 1},
    "return_documents": {"return_documents": False},
    "text_1": {"text_1": "x"},
    "text_2": {"text_2": "x"},
    "items": {"queries": "x", "items": "y"},
    "data_1": {"data_1": "x", "data_2": "y"},
    "data_2": {"data_1": "x", "data_2": "y"},
    "system": {"system": "be kind"},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 2}},
    "output_config": {"output_config": {"effort": "low"}},
    "stop_sequences": {"stop_sequences": ["x"]},
    "prompt": {"prompt": [1, 2]},
    "prompt_token_ids": {"prompt_token_ids": [[1, 2], [3]]},
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
    "priority": {"priority": -1},
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
    (PLAIN, "logprob_token_ids"): {"logprobs": 1, "logprob_token_ids": [3]},
    (PLAIN, "return_tokens_as_token_ids"): {"logprobs": 1, "return_tokens_as_token_ids": True},
    (RESPONSES, "top_logprobs"): {"include": [LOGPROBS], "top_logprobs": 2},
    **{
        (RESPONSES, name): {"tools": [{"type": "function", **FUNCTION}], **more}
        for name, more in (("tools", {}), ("tool_choice", {"tool_choice": "auto"}))
    },
    **{
        (path, name): {"tools": [{"name": "f", "input_schema": SCHEMA}], **more}
        for path in (MESSAGES, COUNT)
        for name, more in (("tools", {}), ("tool_choice", {"tool_choice": {"type": "auto"}}))
    },
    (RESPONSES, "parallel_tool_calls"): {"parallel_tool_calls": False},
    **{
        (path, "model"): {"model": LEAST[path]["model"]}
        for path in (EMBEDDINGS, "/rerank", "/score")
    },
    **{
        (path, "truncate_prompt_tokens"): {"truncate_prompt_tokens": -1}
        for path in ("/rerank", "/score")
    },
    **{("/score", name): {"queries": "x", "documents": "y"} for name in ("queries", "documents")},
    ("/tokenize", "prompt"): {"prompt": "x"},
}
PAIRS = {"queries", "documents", "items", "data_1", "data_2"}  # instead of text_1 and text_2
ANYTHING = ("user",)  # the value is not looked at
WRONG = ({"x": {"x": []}}, 0.5, "x")  # no other field takes all of them
WANTED = (True, 7, "x", ["x"], {"x": "x"})  # of each kind one


def rows(path: str, what: str) -> dict[str, str]:
    """The field and the value of the rows of a route that say so."""
    (table,) = re.findall(rf"^## POST {path}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^\| `(\w+)` \| ?(.*?) \| (\w+)(?:;.*)? \|$", table, re.MULTILINE)
    return {name: value for name, value, here in found if here == what}


def here(path: str) -> set[str]:
    """Every field of a route that the page has."""
    return {name for what in (SERVED, IGNORED, REFUSED) for name in rows(path, what)}


def test_the_page_is_as_the_code() -> None:
    assert page() == PAGE, "`make docs` writes docs/api.md anew"
    assert {route.path for route in ROUTES} == LEAST.keys() | {FILES, BATCHES}
    for path in LEAST:
        count = sum(len(rows(path, what)) for what in (SERVED, IGNORED, REFUSED))
        assert count == len(here(path)), "each field has one row"


@pytest.mark.parametrize("path", KNOWN_TO_CLIENTS)
def test_what_clients_can_send_is_on_the_page(path: str) -> None:
    kind = KNOWN_TO_CLIENTS[path]
    sent = kind.__required_keys__ | kind.__optional_keys__
    assert len(sent) >= 3
    assert sent <= here(path)


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
    """Where an answer says what is wrong, in the shape of its API."""
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return str(error["param"] if "param" in error else error["message"].split(":")[0].split()[0])


@pytest.mark.parametrize("path", LEAST)
async def test_what_is_served_is_taken(client, path):
    served = rows(path, SERVED)
    assert served
    for name in served:
        given = OWN[path, name] if (path, name) in OWN else GIVEN[name]
        if name == "previous_response_id":
            first = (await client.post(path, json=LEAST[path])).json()
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
            assert statuses & {400, 404}, f"{name} is not looked at"


@pytest.mark.parametrize("path", LEAST)
async def test_what_is_ignored_changes_no_answer(client, router, path):
    async def asked(**more: Any) -> tuple[str, Any]:
        reply = await client.post(path, json={**LEAST[path], **more})
        assert reply.status_code == 200, (more, reply.text)
        text = re.sub(r"[0-9a-f]{32}", "ID", reply.text)
        sent = [(list(start.prompt_ids), start.params) for start in router.starts]
        router.starts.clear()
        return re.sub(r'"(created|created_at|completed_at)":\d+', "", text), sent

    plain = await asked()
    ignored = rows(path, IGNORED)
    assert len(ignored) > (1 if "tokenize" in path else 6)
    for name in ignored:
        for value in WANTED:
            assert await asked(**{name: value}) == plain, name


@pytest.mark.parametrize("path", LEAST)
async def test_what_is_refused_is_named(client, path):
    refused = rows(path, REFUSED)
    assert refused
    for name, value in refused.items():
        taken = [json.loads(word) for word in re.findall(r"`(.*?)`", value)]
        for wanted in WANTED:
            if wanted not in taken:
                reply = await client.post(path, json={**LEAST[path], name: wanted})
                assert error_of(reply) == name, (wanted, reply.text)
        for nothing in (None, *taken):
            reply = await client.post(path, json={**LEAST[path], name: nothing})
            assert reply.status_code == 200, (name, nothing, reply.text)


@pytest.fixture(scope="module")
def with_database() -> Iterator[httpx.Client]:
    with served_gateway() as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def test_a_files_form_is_as_the_page_has_it(with_database: httpx.Client) -> None:
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


def test_a_batchs_body_is_as_the_page_has_it(with_database: httpx.Client) -> None:
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
