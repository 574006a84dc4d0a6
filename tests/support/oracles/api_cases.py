"""Requests that Schemathesis makes from /openapi.json, valid and invalid ones, and rules for their
answers.
"""

from collections import Counter
from typing import Any

import httpx
import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

HI = [{"role": "user", "content": "hi"}]
JUDGED = {"model": "reranker", "query": "hi", "documents": ["hi", "you"]}
SCORED = {"model": "reranker", "text_1": "hi", "text_2": ["hi", "you"]}
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'
# A body of each route that can be answered.
ANSWERED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HI},
    "/v1/chat/completions/batch": {"model": "tiny", "messages": [HI, HI]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "hi"},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HI},
    "/v1/embeddings": {"model": "embedder", "input": "hi"},
    "/api/chat": {"model": "tiny", "messages": HI},
    "/api/generate": {"model": "tiny", "prompt": "hi"},
    "/api/embed": {"model": "embedder", "input": "hi"},
    "/api/embeddings": {"model": "embedder", "prompt": "hi"},
    "/api/show": {"model": "tiny"},
    "/v2/rerank": JUDGED,
    "/rerank": JUDGED,
    "/v1/rerank": JUDGED,
    "/score": SCORED,
    "/v1/score": SCORED,
    "/tokenize": {"model": "tiny", "prompt": "hi"},
    "/apply-template": {"model": "tiny", "messages": HI},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
    "/v1/files": {"purpose": "batch", "file": LINE},
    "/v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
}
PAIRS = {"queries", "items", "data_1", "data_2"}  # of /score, instead of text_1 and text_2
CHECKS = [
    not_a_server_error,
    status_code_conformance,  # it is documented
    content_type_conformance,
    response_schema_conformance,  # errors have the shape of their api
]


def run_cases(url: str, num_cases: int, seed: int) -> dict[str, Counter[int]]:
    """Return the statuses of the answers, by operation. Most requests with a body are completed so
    that they pass their first invalid field. Raises violations in an answer.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    bodies = [one for one in operations if one.body]
    rest = [one for one in operations if not one.body]
    each_rest = max(1, num_cases // 10 // len(rest))
    each_body = -(-num_cases // len(bodies) // 2)  # of each mode
    statuses: dict[str, Counter[int]] = {}
    there: dict[str, str] = {}
    # Certificates are slow to load, and useless here.
    with httpx.Client(base_url=url, timeout=30, verify=False) as client:
        for operation in operations:
            names_one = "{" in operation.path or operation.label == "POST /v1/batches"
            if names_one and not there:
                there = _made(client)
            if operation in bodies:
                valid = _ask(operation, GenerationMode.POSITIVE, each_body, seed, there)
                statuses[operation.label] = valid + _ask(
                    operation, GenerationMode.NEGATIVE, each_body, seed, there
                )
            else:
                mode = GenerationMode.POSITIVE
                statuses[operation.label] = _ask(operation, mode, each_rest, seed, there)
            if names_one and operation.method != "get":  # it may have ended or removed them
                there = {}
    return statuses


def _made(client: httpx.Client) -> dict[str, str]:
    """Make a model, a new file, a batch and a response; return their ids by their place in
    requests.
    """

    def made(path: str, **more: Any) -> str:
        name: str = client.post(path, **more).raise_for_status().json()["id"]
        return name

    form: Any = {"data": {"purpose": "batch"}, "files": {"file": LINE}}
    file = made("/v1/files", **form)
    batch = made("/v1/batches", json={**ANSWERED["/v1/batches"], "input_file_id": file})
    response = made("/v1/responses", json=ANSWERED["/v1/responses"])
    chat = made("/v1/chat/completions", json=ANSWERED["/v1/chat/completions"])
    return {
        "/v1/models/{name}": "tiny", "file_id": file,
        "input_file_id": file, "batch_id": batch, "name": response, "request_id": chat,
    }  # fmt: skip


def _help(case: schemathesis.Case, how_much: int, turn: int, there: dict[str, str]) -> None:
    """Insert existing ids, and make some bodies answerable: their own fields, and one or two
    others, chosen by `turn`.
    """
    for name in case.path_parameters or {}:
        case.path_parameters[name] = there.get(case.path, there[name])
    if not isinstance(case.body, dict):
        return
    answered = dict(ANSWERED[case.path])
    if "input_file_id" in case.body:
        answered["input_file_id"] = there["input_file_id"]
    if how_much == 1:
        case.body |= {name: answered[name] for name in answered if name == "model"}
    elif how_much == 2:
        case.body |= {name: answered[name] for name in answered if name in case.body}
    else:
        others = sorted(case.body.keys() - answered.keys() - PAIRS)
        chosen = (others[turn % len(others) :] + others)[: how_much - 2] if others else []
        case.body = {**{name: case.body[name] for name in chosen}, **answered}


def _ask(
    operation: Any, mode: GenerationMode, num_cases: int, seed: int, there: dict[str, str]
) -> Counter[int]:
    found: Counter[int] = Counter()

    @hypothesis.seed(seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=mode),
        helped=st.sampled_from((0, 1, 2, 3, 3, 4)),
        turn=st.integers(0, 99),
    )
    def ask(case: schemathesis.Case, helped: int, turn: int) -> None:
        if helped:
            _help(case, helped, turn, there)
        answer = case.call(timeout=30)
        found[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    ask()
    return found
