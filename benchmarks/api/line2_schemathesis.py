"""Line 2: 3,000 requests that Schemathesis generates from /openapi.json: no answer is a 5xx, each
has a documented status and shape, and errors have the shape of their dialect. The seed is random;
`--seed N` repeats a run."""

import argparse
import json
import random
import sys
from collections import Counter

from oracles.api_cases import ANSWERED, run_cases
from systems.served_gateway import served_gateway

CASES = 3000
LEAST = 20  # answers of 200 per route with a body; with fewer, a route is hardly tested


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", file=sys.stderr)
    figures = {"seed": asked.seed, "wrong": ""}
    statuses = {}
    with served_gateway() as url:
        try:
            statuses = run_cases(url, asked.cases, asked.seed)
        except (Exception, BaseExceptionGroup) as error:  # a group of failed checks of one answer
            figures["wrong"] = str(error)[:4000]
    served = [statuses.get(f"POST {path}", Counter())[200] for path in ANSWERED]
    cases = sum(found.total() for found in statuses.values())
    enough = cases >= asked.cases and min(served) * CASES >= LEAST * asked.cases
    by_route = {path: dict(sorted(found.items())) for path, found in statuses.items()}
    ok = not figures["wrong"] and enough
    print(json.dumps({"ok": ok, **figures, "cases": cases, "statuses": by_route}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
