"""A prefill worker killed late in a long prompt: decode goes on from the last verified block."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from fleet import SECRET, Fleet, wait_for

from pdserve.protos import common_pb2, fleet_pb2, router_pb2, router_pb2_grpc
from pdserve.services.host.channel import bearer

LENGTH = 2_400
CHUNK = 64
OPTIONS = ("--kv-tokens", "8192", "--chunk-size", str(CHUNK), "--remote-prefill", "always")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet("--prefill", "2", "--decode", "1", "--kv-transport", "tcp", *OPTIONS) as fleet:
        yield fleet


def ask(fleet: Fleet, tenant: bytes) -> tuple[list[int], common_pb2.Finished]:
    """The same prompt for every tenant, and no tenant finds what another has cached."""
    message = router_pb2.GenerateRequest(
        prompt_ids=[(i * 37 + i * i) % 40_000 + 100 for i in range(LENGTH)],
        params=common_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        seed=1,
        cache_salt=tenant,
        timeout_ms=300_000,
    )
    ids: list[int] = []
    finished = common_pb2.Finished()
    with grpc.insecure_channel(fleet.router) as channel:
        for event in router_pb2_grpc.RouterStub(channel).Generate(message, metadata=bearer(SECRET)):
            if event.WhichOneof("event") == "tokens":
                assert event.tokens.position == len(ids)
                ids.extend(event.tokens.ids)
            elif event.WhichOneof("event") == "finished":
                finished = event.finished
    return ids, finished


def workers(fleet: Fleet, role: int) -> list[Any]:
    return [w for w in fleet.fleet_view().workers if w.hello.role == role]


def received(fleet: Fleet) -> int:
    """Bytes of KV that decode has verified so far."""
    (decode,) = workers(fleet, fleet_pb2.DECODE)
    return sum(t.bytes for t in decode.load.transports)


def computed(fleet: Fleet, role: int) -> dict[bytes, int]:
    """Prompt tokens by boot id of the workers."""
    return {w.hello.boot: w.load.prompt_tokens for w in workers(fleet, role)}


def pid_of(fleet: Fleet, worker: Any) -> int:
    port = int(worker.hello.address.rsplit(":", 1)[1])
    for pid in fleet.pids("prefill"):
        listening = psutil.Process(pid).net_connections(kind="tcp")
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in listening):
            return pid
    raise AssertionError(f"no process listens at {worker.hello.address}")


def test_a_prefill_killed_late_costs_only_the_missing_chunks(fleet: Fleet) -> None:
    whole, finished = ask(fleet, b"fault-free")
    assert finished.remote
    wait_for(lambda: received(fleet) > 0, 10, "a report of decode")
    wait_for(fleet.all_blocks_back, 10, "a quiet fleet")
    size = start = received(fleet)
    pids = {w.hello.boot: pid_of(fleet, w) for w in workers(fleet, fleet_pb2.PREFILL)}
    before = {role: computed(fleet, role) for role in (fleet_pb2.PREFILL, fleet_pb2.DECODE)}

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, fleet, b"faulty")
        wait_for(lambda: received(fleet) - start >= 0.75 * size, 120, "three quarters of the KV")
        (victim,) = [w for w in workers(fleet, fleet_pb2.PREFILL) if w.load.blocks_used]
        os.kill(pids[victim.hello.boot], signal.SIGKILL)
        share = (received(fleet) - start) / size
        ids, finished = answer.result(300)

    assert 0.75 <= share < 1, "it was killed between the first and the last frame"
    assert ids == whole
    assert not finished.remote, "decode went on itself"
    assert finished.cached_tokens == 0, "what was verified is no cache hit of the request"
    wait_for(fleet.all_blocks_back, 10, "blocks back")
    (decoded,) = (
        tokens - before[fleet_pb2.DECODE][boot]
        for boot, tokens in computed(fleet, fleet_pb2.DECODE).items()
    )
    assert 1 < decoded <= (1 - share) * LENGTH + 2 * CHUNK
    for boot, tokens in computed(fleet, fleet_pb2.PREFILL).items():
        if boot in before[fleet_pb2.PREFILL] and boot != victim.hello.boot:
            assert tokens == before[fleet_pb2.PREFILL][boot], "the other one has not begun anew"
