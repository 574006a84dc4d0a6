"""A few of the requests of benchmarks/api/line2_schemathesis.py."""

from api_cases import run_cases
from served_gateway import served_gateway

CASES = 100


def test_answers_are_as_described() -> None:
    with served_gateway() as url:
        statuses = run_cases(url, CASES, seed=1)
    print(statuses)
    assert sum(found.total() for found in statuses.values()) >= CASES
    posted = [found for label, found in statuses.items() if label.startswith("POST")]
    assert len(posted) == 4
    assert all(found[400] for found in posted)
    assert sum(found[200] for found in posted) >= 5, "not all end at their first wrong field"
