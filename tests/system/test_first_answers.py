"""`pdserve up` without options answers the shortest request of every route of every API."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from systems.eventually import wait_until
from systems.fleet import Fleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

QUESTION = "What is the capital of Japan?"
FACT = "Tokyo"
REQUEST = [{"role": "user", "content": QUESTION}]
CAPITALS = "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is"
BEGIN = {"prompt": CAPITALS, "max_tokens": 4}
ANSWERED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": REQUEST},
    "/v1/chat/completions/batch": {"messages": [REQUEST, REQUEST]},
    "/v1/completions": BEGIN,
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": {"messages": REQUEST, "max_tokens": 40},
    "/api/chat": {"messages": REQUEST},
    "/api/generate": {"prompt": QUESTION},
}
# A part of each response.
COMPUTED: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses/input_tokens": ({"input": QUESTION}, '"input_tokens":'),
    "/v1/messages/count_tokens": ({"messages": REQUEST}, '"input_tokens":'),
    "/api/show": ({}, '"template":'),
    "/tokenize": ({"prompt": QUESTION}, '"tokens":'),
    "/detokenize": ({"tokens": [504, 3575]}, '"prompt":"The capital"'),
    "/apply-template": ({"messages": REQUEST}, QUESTION),
}
# Routes of other tasks, which refuse this model.
RERANK = {"query": QUESTION, "documents": [FACT]}
SCORE = {"text_1": QUESTION, "text_2": FACT}
OTHER_TASKS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": QUESTION},
    "/api/embed": {"input": QUESTION},
    "/api/embeddings": {"prompt": QUESTION},
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/score": SCORE,
    "/v1/score": SCORE,
}
STORED = {"/v1/files", "/v1/batches"}


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    with (
        Fleet(certificates=True) as fleet,
        httpx.Client(base_url=fleet.url, timeout=300) as client,
    ):
        client.get("/health").raise_for_status()
        yield client


def test_every_answer_has_the_fact(api: httpx.Client, subtests: pytest.Subtests) -> None:
    for path, body in ANSWERED.items():
        with subtests.test(path=path):
            reply = api.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert FACT in reply.text


def test_texts_are_counted_and_converted(api: httpx.Client, subtests: pytest.Subtests) -> None:
    for path, (body, part) in COMPUTED.items():
        with subtests.test(path=path):
            reply = api.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert part in reply.text


def test_a_batch_of_one_line_is_answered(api: httpx.Client) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BEGIN}
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": json.dumps(line)}}
    file = api.post("/v1/files", **form)
    body = {
        "input_file_id": file.raise_for_status().json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = api.post("/v1/batches", json=body).raise_for_status().json()

    def output() -> str:
        found = api.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
        assert found["status"] in ("validating", "in_progress", "finalizing", "completed"), found
        return str(found["output_file_id"] or "")

    name = wait_until(output, "the batch")
    assert FACT in api.get(f"/v1/files/{name}/content").text


def test_routes_of_other_tasks_refuse_the_model(
    api: httpx.Client, subtests: pytest.Subtests
) -> None:
    for path, body in OTHER_TASKS.items():
        with subtests.test(path=path):
            reply = api.post(path, json=body)
            assert reply.status_code == 400
            assert "model" in reply.text


def test_pages_and_lists_are_served(api: httpx.Client, subtests: pytest.Subtests) -> None:
    paths = api.get("/openapi.json").raise_for_status().json()["paths"]
    for path in (path for path, methods in paths.items() if "get" in methods and "{" not in path):
        with subtests.test(path=path):
            assert api.get(path).status_code == 200


def test_every_route_has_a_request_here(api: httpx.Client) -> None:
    paths = api.get("/openapi.json").raise_for_status().json()["paths"]
    posted = {path for path, methods in paths.items() if "post" in methods and "{" not in path}
    assert posted == {*ANSWERED, *COMPUTED, *OTHER_TASKS, *STORED}
