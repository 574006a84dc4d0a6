"""A sample of the requests of benchmarks/api/line2_schemathesis.py."""

from oracles.api_cases import ANSWERED, run_cases
from systems.served_gateway import served_gateway

CASES = 60


def test_answers_are_as_described() -> None:
    with served_gateway() as url:
        statuses = run_cases(url, CASES, seed=1)
    print(statuses)
    assert sum(found.total() for found in statuses.values()) >= CASES
    bodies = [statuses[f"POST {path}"] for path in ANSWERED]
    assert all(found[400] for found in bodies)
    served = sum(found[200] > 0 for found in bodies)
    assert served >= len(bodies) // 2, "at least half of the routes must answer with success"
