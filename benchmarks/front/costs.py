"""The cost of everything between the kernels and a client: processor time per token, added
latency, the effect of one long prompt on the streams of others, and the speed of one stream.

A router, a gateway and a decode worker whose model computes nothing (fast_decode.py); a step takes
as long as a model would for that batch. The latency of a token is the time from the end of its step
to its arrival at the client; clients are in this process. Words: names of parts, all parts by
default; `--any-load` as in cpu/bench.py. Prints one JSON object.
"""

import argparse
import asyncio
import json
import statistics
from typing import Any

import machine
import uvloop
from front import one_stream
from front.clients import Stream, streams
from front.clock import latency_s
from front.fast_decode import MODEL
from front.fast_system import FastSystem

from pdserve.cli.load import percentile
from pdserve.services.common.auth.certificates import Role

STEP_S = {1: 0.002, 32: 0.01, 128: 0.02}  # by streams
NUM_TOKENS = {1: 2000, 32: 500, 128: 400}
MANY, FEW_TOKENS = 128, 40
ROUNDS = 5
AT_ONCE = 64
LONG_PROMPT = 128 << 10


def latencies_ms(system: FastSystem, answers: list[Stream]) -> list[float]:
    times = system.clock.times()
    return [
        1e3 * latency_s(times, mark, arrived)
        for answer in answers
        for mark, arrived in zip(answer.marks, answer.arrived, strict=True)
    ]


def warm(system: FastSystem) -> None:
    uvloop.run(streams(system.http, MODEL, 8, 100))


def costs() -> dict[str, Any]:
    """Microseconds per token in each process, by the number of streams. The cost of a request apart
    from its tokens is included, and listed separately, from answers of 128 streams that differ in
    length. The minimum over several rounds with the same prompts counts, for each process
    separately: other load on the machine only adds, here up to a half."""
    rounds: dict[int, list[dict[Role, float]]] = {}
    short: list[dict[Role, float]] = []
    for count, step_s in STEP_S.items():
        with FastSystem(step_s) as system:
            warm(system)
            rounds[count] = [_used_us(system, count, NUM_TOKENS[count]) for _ in range(ROUNDS)]
            if count == MANY:
                short = [_used_us(system, count, FEW_TOKENS) for _ in range(ROUNDS)]
    found = {count: _least(of_count) for count, of_count in rounds.items()}
    long = found[MANY]
    few = _least(short)
    a_token = {
        role: (long[role] - few[role]) / MANY / (NUM_TOKENS[MANY] - FEW_TOKENS) for role in long
    }
    a_request = {role: few[role] / MANY - FEW_TOKENS * a_token[role] for role in long}
    us_a_token = {
        count: {role: round(us / count / NUM_TOKENS[count], 1) for role, us in used.items()}
        for count, used in found.items()
    }
    return {
        "us_a_token": us_a_token,
        "us_a_request": {role: round(us) for role, us in a_request.items()},
        "us_a_token_alone": {role: round(us, 1) for role, us in a_token.items()},
        "rounds": [
            {role: round(us / MANY / NUM_TOKENS[MANY], 1) for role, us in used.items()}
            for used in rounds[MANY]
        ],
    }


def _least(rounds: list[dict[Role, float]]) -> dict[Role, float]:
    return {role: min(used[role] for used in rounds) for role in rounds[0]}


def _used_us(system: FastSystem, count: int, num_tokens: int) -> dict[Role, float]:
    before = system.cpu_s()
    uvloop.run(streams(system.http, MODEL, count, num_tokens))
    after = system.cpu_s()
    return {role: 1e6 * (after[role] - before[role]) for role in after}


def latency() -> dict[str, Any]:
    """Milliseconds from the end of a step to the client."""
    with FastSystem(STEP_S[32]) as system:
        warm(system)
        answers = uvloop.run(streams(system.http, MODEL, AT_ONCE, 500))
        added = latencies_ms(system, answers)
    p50, p99 = statistics.median(added), percentile(sorted(added), 99)
    return {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "streams": AT_ONCE}


def long_prompt() -> dict[str, Any]:
    """The increase of the p99 between the tokens of others while one prompt of 128 KiB arrives."""
    with FastSystem(STEP_S[32]) as system:
        warm(system)
        calm = uvloop.run(streams(system.http, MODEL, 16, 500))
        shaken, sent_at, done_at = uvloop.run(_beside_a_long_prompt(system))
    without = percentile(sorted(_gaps_ms(calm)), 99)
    beside = percentile(sorted(_gaps_ms(shaken)), 99)
    within = any(sent_at < t < done_at for answer in shaken for t in answer.arrived)
    if not within:
        raise RuntimeError("no token of another stream arrived while the prompt was prepared")
    return {"p99_ms": round(without, 2), "beside_ms": round(beside, 2)}


async def _beside_a_long_prompt(system: FastSystem) -> tuple[list[Stream], float, float]:
    others = asyncio.create_task(streams(system.http, MODEL, 16, 500))
    await asyncio.sleep(1.0)
    (long,) = await streams(system.http, MODEL, 1, 2, "a" * LONG_PROMPT)
    return await others, long.sent_at, long.arrived[0]


def _gaps_ms(answers: list[Stream]) -> list[float]:
    return [
        1e3 * (later - earlier)
        for answer in answers
        for earlier, later in zip(answer.arrived, answer.arrived[1:], strict=False)
    ]


PARTS = {
    "costs": costs,
    "latency": latency,
    "long_prompt": long_prompt,
    "one_stream": one_stream.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--any-load", action="store_true")
    args = parser.parse_args()
    load = machine.quiet(machine.two_cores(), args.any_load)
    found = {name: PARTS[name]() for name in args.parts or PARTS}
    print(json.dumps({"load_by_others": round(load, 3), **found}))


if __name__ == "__main__":
    main()
