"""Line 6, first half: 32 identical prompts of 4,000 tokens at once cost one prefill, one transfer.

1x means: the prefill worker computes the 3,999 tokens before the last, decode receives the bytes of
one such prompt, as measured with a single request, and computes for each of the 32 its last token
(4,000 tokens are 125 whole blocks). Then the same with the prefill worker killed between the first
frame and the last: all 32 are answered, and the tokens that decode had verified at the kill plus
all prompt tokens that the surviving workers compute are at most 1.25 times one prompt.
"""

import asyncio
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from systems.cluster_secret import open_channel
from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.late_kill import computed, pid_of, received, workers

from pdserve.protos import common_pb2, fleet_pb2, router_pb2, router_pb2_grpc

LENGTH, TOKENS, TOGETHER = 4_000, 12, 32
SHARE = 0.5  # of the KV that decode has when the worker is killed
MOST = 1.25
OPTIONS = (
    "--prefill", "2", "--decode", "1", "--kv-transport", "tcp", "--kv-tokens", "16384",
)  # fmt: skip


@dataclass
class Figures:
    """Figures of the fleet's workers since they started."""

    decoded: int  # prompt tokens that decode computed
    prefilled: dict[bytes, int]  # prompt tokens that prefill workers computed
    sent: int  # bytes of KV that decode has verified
    attached: int
    placed_again: int


def figures(fleet: Fleet) -> Figures:
    (decode,) = workers(fleet, fleet_pb2.DECODE)
    return Figures(
        decode.load.prompt_tokens,
        computed(fleet, fleet_pb2.PREFILL),
        received(fleet),
        decode.load.attached,
        decode.load.placed_again,
    )


async def ask(fleet: Fleet, count: int, tenant: bytes) -> list[tuple[int, ...]]:
    """The ids of `count` equal requests, sent together."""
    message = router_pb2.GenerateRequest(
        prompt_ids=[(i * 37 + i * i) % 40_000 + 100 for i in range(LENGTH)],
        params=common_pb2.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
        seed=1,
        cache_salt=tenant,
        timeout_ms=300_000,
    )

    async def one(stub: router_pb2_grpc.RouterStub) -> tuple[int, ...]:
        ids: list[int] = []
        async for event in stub.Generate(message):
            if event.WhichOneof("event") == "tokens":
                assert event.tokens.position == len(ids)
                ids.extend(event.tokens.ids)
        return tuple(ids)

    async with open_channel(fleet.router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        return await asyncio.gather(*(one(stub) for _ in range(count)))


def quiet(fleet: Fleet) -> Figures:
    """Wait until all resources are released and every worker has reported it."""
    wait_until(fleet.all_blocks_back, "a quiet fleet", limit_s=30)
    before = figures(fleet)
    while True:
        time.sleep(1.2)  # an idle worker reports once per second
        after = figures(fleet)
        if after == before:
            return after
        before = after


def together(fleet: Fleet) -> dict[str, object]:
    """One request alone, then 32 together."""
    start = quiet(fleet)
    (whole,) = asyncio.run(ask(fleet, 1, b"alone"))
    alone = quiet(fleet)
    answers = asyncio.run(ask(fleet, TOGETHER, b"together"))
    end = quiet(fleet)
    size = alone.sent - start.sent
    prefilled = sum(end.prefilled.values()) - sum(alone.prefilled.values())
    decoded, sent = end.decoded - alone.decoded, end.sent - alone.sent
    equal = sum(answer == whole for answer in answers)
    once = prefilled == LENGTH - 1 and decoded == TOGETHER and sent == size
    return {
        "ok": once and equal == TOGETHER and end.attached - alone.attached == TOGETHER - 1,
        "prefill_tokens": prefilled,
        "decode_prompt_tokens": decoded,
        "bytes": sent,
        "bytes_alone": size,
        "attached": end.attached - alone.attached,
        "tokens_equal": equal,
        "whole": whole,
    }


def kill_between(fleet: Fleet, size: int) -> tuple[list[tuple[int, ...]], float, bytes]:
    """The answers, the share of the KV at the kill, and the killed worker."""
    start = received(fleet)
    pids = {w.hello.boot: pid_of(fleet, w) for w in workers(fleet, fleet_pb2.PREFILL)}
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: asyncio.run(ask(fleet, TOGETHER, b"killed")))
        wait_until(
            lambda: received(fleet) - start >= SHARE * size, f"{SHARE:.0%} of the KV", limit_s=120
        )
        (victim,) = [w for w in workers(fleet, fleet_pb2.PREFILL) if w.load.blocks_used]
        os.kill(pids[victim.hello.boot], signal.SIGKILL)
        share = (received(fleet) - start) / size
        return answers.result(300), share, victim.hello.boot


def killed(fleet: Fleet, size: int, whole: tuple[int, ...]) -> dict[str, object]:
    """Kill the prefill worker while 31 requests wait for its data."""
    before = quiet(fleet)
    answers, share, victim = kill_between(fleet, size)
    wait_until(lambda: len(fleet.pids("prefill")) == 2, "two prefill workers")
    after = quiet(fleet)
    # Of the dead worker's tokens, only those verified by decode are known.
    lived = sum(
        tokens - before.prefilled.get(boot, 0)
        for boot, tokens in after.prefilled.items()
        if boot != victim
    )
    decoded = after.decoded - before.decoded
    total = share * LENGTH + lived + decoded
    equal = sum(answer == whole for answer in answers)
    again = after.placed_again - before.placed_again
    within = total <= MOST * LENGTH and 0 < share < 1
    return {
        "ok": within and equal == TOGETHER and again >= TOGETHER - 1,
        "killed_at": round(share, 3),
        "computed_after": {"prefill": lived, "decode": decoded},
        "times_one_prompt": round(total / LENGTH, 3),
        "placed_again": again,
        "tokens_equal": equal,
    }


def main() -> int:
    with Fleet(*OPTIONS) as fleet:
        once = together(fleet)
        size, whole = once["bytes_alone"], once.pop("whole")
        assert isinstance(size, int)
        assert isinstance(whole, tuple)
        lost = killed(fleet, size, whole)
    ok = bool(once["ok"] and lost["ok"])
    print(json.dumps({"ok": ok, "prompts": TOGETHER, "prompt_tokens": LENGTH} | {
        "together": once, "prefill_killed": lost,
    }))  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
