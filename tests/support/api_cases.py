"""Requests that Schemathesis makes from /openapi.json, valid ones and broken ones, and what must be
true of their answers."""

from collections import Counter
from typing import Any

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

MODEL = "tiny"
PROMPTS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "tokens": [1, 2, 3],
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,  # it is documented
    content_type_conformance,
    response_schema_conformance,  # errors have the shape of OpenAI's
]


def run_cases(url: str, num_cases: int, seed: int) -> dict[str, Counter[int]]:
    """The statuses of the answers, by operation. Most requests with a body are helped to get
    further than to their first wrong field. Raises what is wrong of an answer."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    bodies = [one for one in operations if one.body]
    rest = [one for one in operations if not one.body]
    each_rest = max(1, num_cases // 10 // len(rest))
    each_body = -(-num_cases // len(bodies) // 2)  # of each mode
    statuses: dict[str, Counter[int]] = {}
    for operation in operations:
        if operation in bodies:
            valid = _ask(operation, GenerationMode.POSITIVE, each_body, seed)
            statuses[operation.label] = valid + _ask(
                operation, GenerationMode.NEGATIVE, each_body, seed
            )
        else:
            statuses[operation.label] = _ask(operation, GenerationMode.POSITIVE, each_rest, seed)
    return statuses


def _help(body: dict[str, Any], how_much: int) -> None:
    """Names the model that is served, and gives some a prompt that can be answered."""
    body["model"] = MODEL
    if how_much == 1:
        return
    for name, prompt in PROMPTS.items():
        if name in body:
            body[name] = prompt
    if "top_logprobs" in body:
        body["logprobs"] = True
    for name in ("stream_options", "add_special_tokens", "min_tokens", "best_of"):
        if how_much == 2:
            body.pop(name, None)


def _ask(operation: Any, mode: GenerationMode, num_cases: int, seed: int) -> Counter[int]:
    found: Counter[int] = Counter()

    @hypothesis.seed(seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), named=st.integers(0, 3))
    def ask(case: schemathesis.Case, named: int) -> None:
        if named and isinstance(case.body, dict):
            _help(case.body, named)
        answer = case.call(timeout=30)
        found[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    ask()
    return found
