"""Kills the prefill worker of a long prompt once decode has verified a given share of its KV."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from pdserve.protos import common_pb2, fleet_pb2, router_pb2, router_pb2_grpc
from systems.cluster_secret import BEARER
from systems.eventually import wait_until
from systems.fleet import Fleet


@dataclass(frozen=True)
class Outcome:
    """The result of the prompt."""

    ids: list[int]
    finished: common_pb2.Finished
    share: float  # of the KV that decode had verified when the worker was killed
    decoded: int  # prompt tokens that decode computed itself
    prefilled: int  # prompt tokens that surviving prefill workers computed


def ask(fleet: Fleet, length: int, tenant: bytes) -> tuple[list[int], common_pb2.Finished]:
    """Send the same prompt for every tenant; no tenant finds what another has cached."""
    message = router_pb2.GenerateRequest(
        prompt_ids=[(i * 37 + i * i) % 40_000 + 100 for i in range(length)],
        params=common_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        seed=1,
        cache_salt=tenant,
        timeout_ms=300_000,
    )
    ids: list[int] = []
    finished = common_pb2.Finished()
    with grpc.insecure_channel(fleet.router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for event in stub.Generate(message, metadata=BEARER):
            if event.WhichOneof("event") == "tokens":
                assert event.tokens.position == len(ids)
                ids.extend(event.tokens.ids)
            elif event.WhichOneof("event") == "finished":
                finished = event.finished
    return ids, finished


def workers(fleet: Fleet, role: int) -> list[Any]:
    return [w for w in fleet.fleet_view().workers if w.hello.role == role]


def received(fleet: Fleet) -> int:
    """Return bytes of KV that the one decode worker has verified so far."""
    (decode,) = workers(fleet, fleet_pb2.DECODE)
    return sum(t.bytes for t in decode.load.transports)


def computed(fleet: Fleet, role: int) -> dict[bytes, int]:
    """Return prompt tokens by incarnation of the workers."""
    return {w.hello.incarnation: w.load.prompt_tokens for w in workers(fleet, role)}


def pid_of(fleet: Fleet, worker: Any) -> int:
    port = int(worker.hello.address.rsplit(":", 1)[1])
    for pid in fleet.pids("prefill"):
        listening = psutil.Process(pid).net_connections(kind="tcp")
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in listening):
            return pid
    raise AssertionError(f"no process listens at {worker.hello.address}")


def kill_late(fleet: Fleet, length: int, share: float, size: int, tenant: bytes) -> Outcome:
    """Kill the worker. `size`: bytes of the whole prompt's KV. The fleet must be idle and have one
    decode worker.
    """
    wait_until(fleet.all_blocks_back, "a quiet fleet")
    start = received(fleet)
    pids = {w.hello.incarnation: pid_of(fleet, w) for w in workers(fleet, fleet_pb2.PREFILL)}
    before = computed(fleet, fleet_pb2.DECODE) | computed(fleet, fleet_pb2.PREFILL)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, fleet, length, tenant)
        wait_until(
            lambda: received(fleet) - start >= share * size, f"{share:.0%} of the KV", limit_s=120
        )
        (victim,) = [w for w in workers(fleet, fleet_pb2.PREFILL) if w.load.blocks_used]
        os.kill(pids[victim.hello.incarnation], signal.SIGKILL)
        reached = (received(fleet) - start) / size
        ids, finished = answer.result(300)
    wait_until(fleet.all_blocks_back, "blocks back")
    more = {
        role: sum(
            tokens - before.get(incarnation, 0)
            for incarnation, tokens in computed(fleet, role).items()
            if incarnation != victim.hello.incarnation
        )
        for role in (fleet_pb2.DECODE, fleet_pb2.PREFILL)
    }
    return Outcome(ids, finished, reached, more[fleet_pb2.DECODE], more[fleet_pb2.PREFILL])
