"""Line 6: gateway and router without torch; seconds from `pdserve up` to the first token."""

import json
import statistics
import time

import httpx
from pytest_line import run_tests
from systems.fleet import Fleet

RUNS = 3
BOUND_S = 2.0  # on two idle cores


def first_token_s() -> float:
    """Seconds from the start of the process to the first streamed piece of text."""
    with Fleet() as fleet:
        question = [{"role": "user", "content": "Hello"}]
        body = {"model": "SmolLM2-135M-Instruct", "messages": question, "stream": True}
        url = f"{fleet.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    return time.monotonic() - fleet.started
    raise AssertionError("no text came")


def main() -> None:
    without_torch = run_tests("tests/services/cli", "tests/gateway/test_main.py", "-k", "torch")
    seconds = [round(first_token_s(), 2) for _ in range(RUNS)]
    figures = {
        "ok": without_torch["ok"] and statistics.median(seconds) <= BOUND_S,
        "without_torch": without_torch,
        "first_token_s": seconds,
        "median_s": statistics.median(seconds),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
