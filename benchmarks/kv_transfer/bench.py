"""The cost of a hand-off of 2,000 tokens, relative to the machine's limits in the same run.

exposed: real processes, shipped model, tcp on loopback: the part of the time to the first token
between the end of the last chunk and decode having everything verified. copies: end.py,
the real Sender and Receiver on a core each, 46 MB; interleaved with a bare socket's copy between
the same two pools (one stream, the same buffers) and one memcpy into decode's pool; medians, and
every byte is compared. Without tags: the payload's tag is neither computed nor compared on either
side, the copies are the same; only the benchmark can do that. Sealed payloads are printed next to
the others. networks: the same between two network namespaces with a rate limit (left out where none
can be made), and through the tests' proxy with a delay, compared with a bare socket there. `make
bench-gpu` measures cuda_ipc.

Arguments: `quick` (fewer rounds), or names of parts.
"""

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import grpc
from kv_transfer.end import NUM_BYTES, NUM_TOKENS
from kv_transfer.ends import ADDRESSES, NAMESPACES, Ends, networks, no_networks
from systems.cluster_secret import BEARER
from systems.fault_proxy import FaultProxy
from systems.fleet import Fleet

from pdserve.protos import common_pb2, router_pb2, router_pb2_grpc

ROUNDS, PROMPTS, FEW = 15, 9, 5
RATES = {"1gbit": 125e6, "10gbit": 1250e6}  # bytes per second
DELAYS_S = (0.001, 0.010)
FLEET = (
    "--prefill", "1", "--decode", "1", "--kv-transport", "tcp", "--kv-tokens", "8192",
    "--remote-prefill", "always",
)  # fmt: skip


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def gb_s(rates: list[float]) -> float:
    return round(statistics.median(rates) / 1e9, 3)


def phases_of(fleet: Fleet, number: int) -> common_pb2.Phases:
    message = router_pb2.GenerateRequest(
        prompt_ids=[(i * 37 + i * i + number) % 40_000 + 100 for i in range(NUM_TOKENS + 1)],
        params=common_pb2.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        seed=1,
        cache_salt=b"%d" % number,  # prevents hits in the cache of another prompt
        timeout_ms=120_000,
    )
    with grpc.insecure_channel(fleet.router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        events = list(stub.Generate(message, metadata=BEARER))
    finished: common_pb2.Finished = events[-1].finished
    return finished.phases


def exposed(quick: bool) -> dict[str, Any]:
    shares, ttfts, waits = [], [], []
    with Fleet(*FLEET) as fleet:
        phases_of(fleet, 0)  # connects and warms up
        for number in range(1, (FEW if quick else PROMPTS) + 1):
            phases = phases_of(fleet, number)
            ttft = phases.queue_s + phases.prefill_s + phases.transfer_s + phases.first_token_s
            shares.append(phases.transfer_s / ttft)
            ttfts.append(ttft)
            waits.append(phases.transfer_s)
        assert fleet.prefills("remote") == len(shares) + 1
    return {
        "share_of_ttft": round(statistics.median(shares), 4),
        "ttft_s": round(statistics.median(ttfts), 4),
        "exposed_ms": [round(1e3 * wait, 2) for wait in sorted(waits)],
    }


def copies(quick: bool) -> dict[str, Any]:
    """Measure all pairs at the same time, alternating, so that they share the load of the
    machine."""
    rates: dict[str, list[float]] = {"bare": [], "memcpy": []}
    with tempfile.TemporaryDirectory() as folder:
        pairs = {
            "tcp": Ends("tcp", folder),
            "tcp_sealed": Ends("tcp", folder, words=["sealed"]),
            "shm": Ends("shm", folder),
            "shm_untagged": Ends("shm", folder, words=["untagged"]),
        }
        try:
            for number in range((FEW if quick else ROUNDS) + 1):
                measured = {"bare": pairs["tcp"].bare(), "memcpy": pairs["shm"].memcpy()}
                measured |= {name: pair.send() for name, pair in pairs.items()}
                for name, rate in measured.items() if number else ():  # the first one connects
                    rates.setdefault(name, []).append(rate)
        finally:
            for pair in pairs.values():
                pair.close()
    median = {name: statistics.median(found) for name, found in rates.items()}
    shares = {
        "tcp_of_bare": median["tcp"] / median["bare"],
        "shm_of_memcpy": median["shm"] / median["memcpy"],
        "shm_untagged_of_memcpy": median["shm_untagged"] / median["memcpy"],
    }
    return {
        "bytes": NUM_BYTES,
        **{name: round(share, 3) for name, share in shares.items()},
        "tcp_sealed_of_bare": round(median["tcp_sealed"] / median["bare"], 3),
        "gb_s": {name: gb_s(found) for name, found in rates.items()},
        "rounds": {name: [round(r / 1e9, 2) for r in found] for name, found in rates.items()},
    }


def in_turn(pair: Ends, rounds: int) -> dict[str, float]:
    bare, ours = [], []
    for number in range(rounds + 1):
        measured = pair.bare(), pair.send()
        if number:
            bare.append(measured[0])
            ours.append(measured[1])
    return {"bare_gb_s": gb_s(bare), "tcp_gb_s": gb_s(ours)}


def shaped(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rounds = 2 if quick else FEW
    with tempfile.TemporaryDirectory() as folder:
        if reason := no_networks():
            say(f"no network namespaces: {reason}")
        for rate, bytes_s in RATES.items() if not reason else ():
            with networks(rate):
                one, other = (
                    {"namespace": n, "bind": a} for n, a in zip(NAMESPACES, ADDRESSES, strict=True)
                )
                pair = Ends("tcp", folder, decode=other, prefill=one)
                try:
                    found[rate] = in_turn(pair, rounds)
                finally:
                    pair.close()
            found[rate]["of_rate"] = round(found[rate]["tcp_gb_s"] * 1e9 / bytes_s, 3)
            say(f"{rate}: {found[rate]}")
        pair = Ends("tcp", folder)
        try:
            with FaultProxy(pair.address) as proxy, FaultProxy(pair.bare_address) as bare_proxy:
                pair.address, pair.bare_address = proxy.address, bare_proxy.address
                for delay_s in DELAYS_S:
                    proxy.delay(delay_s)
                    bare_proxy.delay(delay_s)
                    name = f"delay_{delay_s * 1e3:.0f}_ms"
                    found[name] = in_turn(pair, rounds)
                    say(f"{name}: {found[name]}")
                assert min(p.hits["delayed"] for p in (proxy, bare_proxy)) > 0
        finally:
            pair.close()
    return found


PARTS = {"exposed": exposed, "copies": copies, "networks": shaped}


def main() -> None:
    quick = "quick" in sys.argv[1:]
    wanted = [name for name in PARTS if name in sys.argv[1:]] or list(PARTS)
    figures: dict[str, Any] = {}
    for name in wanted:
        figures[name] = PARTS[name](quick)
        say(f"{name}: {figures[name]}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
