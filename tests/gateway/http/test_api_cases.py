"""A few of the requests of benchmarks/api/line2_schemathesis.py."""

from api_cases import run_cases
from served_gateway import served_gateway

CASES = 100


def test_answers_are_as_described() -> None:
    with served_gateway() as url:
        statuses = run_cases(url, CASES, seed=1)
    print(statuses)
    assert sum(found.total() for found in statuses.values()) >= CASES
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert {200, 400} <= statuses[f"POST {path}"].keys()
