"""The cost of placing a request in function calls, which do not depend on the machine."""

import sys
from collections.abc import Callable
from random import Random
from typing import Any

from placing import BLOCK, KINDS, Router, fill, measure


def num_calls(work: Callable[[], Any]) -> int:
    """The number of Python and C functions that `work` calls."""
    count = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_placing(num_workers: int, num_blocks: int) -> int:
    rng = Random(3)
    router = Router(num_workers // 2, num_workers // 2, rng)
    for worker in router.workers:
        fill(worker, [], 100, rng)
    prompts = [[rng.randrange(50_000) for _ in range(num_blocks * BLOCK)] for _ in range(2)]
    router.place(prompts[0])
    calls = num_calls(lambda: router.place(prompts[1]))
    return calls - num_calls(router.load)


def test_placing_takes_few_calls_per_worker_and_block() -> None:
    few, many = calls_of_a_placing(20, 60), calls_of_a_placing(120, 60)
    assert (many - few) / 100 <= 16
    long = calls_of_a_placing(20, 120)
    assert (long - few) / 60 <= 6, (
        "a block must be hashed once, and looked up only as far as any worker has it"
    )


def test_every_kind_of_prompt_is_measured() -> None:
    figures = measure(decodes=6, prefills=4, num_hashes=200, prompt=100, requests=3)
    assert all(figures[f"{kind}_ms"] > 0 for kind in KINDS)
    assert figures["hashes"] == 200
