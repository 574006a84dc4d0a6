"""Line 1: a second API key learns nothing about the prompts that the first has cached.

NUM prompts are sent with one key and guessed correctly with two others, over HTTP and over gRPC.
Then decode workers are killed under streams of the first key, which continue elsewhere: no other
key finds their prompts, nor do two more keys find any of the NUM. Then PAIRS of a right and a wrong
guess are timed: a rank-sum test must not distinguish them.
"""

import json
import math
import os
import signal
import statistics
import time
from collections.abc import Iterable
from typing import Any

import grpc
import httpx
import psutil
from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.listening import listening

from pdserve.protos import text_pb2, text_pb2_grpc

NUM, PAIRS, KILLS, STREAMED = 100, 200, 6, 120
LEAST_P = 0.01
RETRIES = "pdserve_router_retries_total"
WORDS = "one two three four five six seven eight nine ten eleven twelve "


def prompt(number: int) -> str:
    """About 190 tokens, which no other prompt begins with."""
    return f"{number * 7919} begins this, and then come words: " + WORDS * 14


def ask(fleet: Fleet, key: str, text: str) -> tuple[int, float]:
    """Send a prompt over HTTP: (cached tokens, seconds)."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": text, "max_tokens": 1, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    began = time.perf_counter()
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60)
    took = time.perf_counter() - began
    usage = answer.raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"]), took


def ask_grpc(fleet: Fleet, key: str, text: str) -> int:
    """Cached tokens, over gRPC."""
    request = text_pb2.CompleteRequest(prompt=text)
    request.options.params.max_tokens = 1
    with grpc.insecure_channel(fleet.grpc) as channel:
        stub = text_pb2_grpc.TextStub(channel)
        chunks = list(stub.Complete(request, metadata=[("authorization", f"Bearer {key}")]))
    return int(chunks[-1].usage.cached_tokens)


def guesses(fleet: Fleet, numbers: Iterable[int], second: str, third: str) -> dict[str, Any]:
    """Cached tokens reported to two more keys, which have not sent these prompts before, for
    prompts that the first has sent before, or sends now."""
    own, other_http, other_grpc = [], [], []
    for number in numbers:
        ask(fleet, "one", prompt(number))
        other_http.append(ask(fleet, second, prompt(number))[0])
        other_grpc.append(ask_grpc(fleet, third, prompt(number)))
        own.append(ask(fleet, "one", prompt(number))[0])
    return {
        "prompts": len(own),
        "cached_for_its_own_key_min": min(own),
        "cached_for_another_http_max": max(other_http),
        "cached_for_another_grpc_max": max(other_grpc),
        "ok": min(own) > 0 and not any(other_http) and not any(other_grpc),
    }


def busy_decode(fleet: Fleet) -> int:
    """The decode process that computes something; 0: none."""
    busy = {address for address, states in fleet.blocks().items() if states["used"]}
    pids = (pid for pid in fleet.pids("decode") if busy & listening(psutil.Process(pid)))
    return next(pids, 0)


def failover(fleet: Fleet, number: int) -> tuple[int, int, float]:
    """A stream of the first key whose decode worker dies: (its tokens, tokens of its prompt that
    another key finds cached afterwards, retries)."""
    body = {
        "model": "SmolLM2-135M-Instruct", "prompt": prompt(number), "max_tokens": STREAMED,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"authorization": "Bearer one"}
    before, seen, tokens = fleet.pids("decode"), 0, 0
    retries = fleet.metric(RETRIES)
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=headers,
                      timeout=60) as answer:  # fmt: skip
        for line in answer.iter_lines():
            seen += '"text"' in line
            if seen == 5:
                os.kill(wait_until(lambda: busy_decode(fleet), "a busy worker"), signal.SIGKILL)
                seen += 1
            if '"completion_tokens"' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    wait_until(lambda: len(fleet.pids("decode")) == len(before), "a new decode worker")
    cached, _ = ask(fleet, "two", prompt(number))
    return tokens, cached, fleet.metric(RETRIES) - retries


def p_of_rank_sum(a: list[float], b: list[float]) -> float:
    """Two-sided p of the hypothesis that both are of one distribution (Mann and Whitney, 1947)."""
    ranked = sorted([(x, 0) for x in a] + [(x, 1) for x in b])
    rank_sum = sum(rank for rank, (_, which) in enumerate(ranked, 1) if which == 0)
    n, m = len(a), len(b)
    mean = n * (n + m + 1) / 2
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(rank_sum - mean) / deviation / math.sqrt(2))


def times(fleet: Fleet, first: int, pairs: int) -> dict[str, Any]:
    right, wrong = [], []
    for number in range(first, first + 2 * pairs, 2):
        ask(fleet, "one", prompt(number))
        order = ((number, right), (number + 1, wrong))
        for asked, into in order if number % 4 else order[::-1]:
            into.append(ask(fleet, "two", prompt(asked))[1])
    p = p_of_rank_sum(right, wrong)
    # The test does distinguish prompts cached by the same key.
    own = [ask(fleet, "one", prompt(number))[1] for number in range(first, first + 2 * 50, 2)]
    control = p_of_rank_sum(own, wrong[:50])
    return {
        "pairs": pairs,
        "right_guess_ms": round(1e3 * statistics.median(right), 2),
        "wrong_guess_ms": round(1e3 * statistics.median(wrong), 2),
        "p": round(p, 4),
        "p_of_its_own_key": control,
        "ok": p > LEAST_P and control < LEAST_P,
    }


def main() -> None:
    names = ("one", "two", "three", "four", "five")
    keys = [*(word for name in names for word in ("--api-key", name)), "--open-metrics"]
    # One decode worker at a time has the streams; a second one takes them over.
    with Fleet(*keys, "--prefill", "1", "--decode", "2", certificates=True) as fleet:
        before = guesses(fleet, range(NUM), "two", "three")
        found = [failover(fleet, 50_000 + number) for number in range(KILLS)]
        again = guesses(fleet, range(NUM), "four", "five")
        timed = times(fleet, 20_000, PAIRS)
    died = {
        "kills": KILLS,
        "retries": [retries for _, _, retries in found],
        "tokens": [tokens for tokens, _, _ in found],
        "cached_for_another_max": max(cached for _, cached, _ in found),
        "ok": all(
            tokens == STREAMED and not cached and retries for tokens, cached, retries in found
        ),
    }
    parts = {"calm": before, "failover": died, "after_failover": again, "times": timed}
    print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))


if __name__ == "__main__":
    main()
