"""Whole workers whose options allow another KV identity, and whose KV is sealed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import fake_engine
from systems.worker_kit import Pair, build_with, expected, prompt, worker_pair

from pdserve.engine.kv import KvIdentity
from pdserve.protos import common_pb2 as pb

IDENTITY = KvIdentity(b"d" * 16, "aa", "Q4_1", "cc", "70", "float32", "native/avx512")
OTHERS = {
    "weights": KvIdentity(b"w" * 16, "bb", "Q8_0", "cc", "70", "float32", "native/avx512"),
    "numerics": KvIdentity(b"n" * 16, "aa", "Q4_1", "cc", "70", "float32", "native/avx2"),
}


def run(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    prefill: KvIdentity,
    test: Callable[[Pair, bytes], Any],
    **settings: Any,
) -> None:
    """Hand one prompt from a worker with this identity to one with IDENTITY; then run `test`."""
    identities = iter([IDENTITY, prefill])  # in the order in which the workers start

    def make() -> Any:
        engine = fake_engine(num_blocks=256)
        engine.kv_identity = next(identities)
        return engine

    async def main() -> None:
        async with worker_pair(folder, **settings) as pair:
            theirs = pb.KvIdentity(**IDENTITY.parts())
            attempt = pair.admit(prompt(60))
            admitted = await pair.decode.wait("admitted", attempt)
            pair.start_prefill(attempt, prompt(59), admitted.ticket, kv_identity=theirs)
            await test(pair, attempt)

    build_with(monkeypatch, make)
    asyncio.run(main())


def snapshot(pair: Pair) -> Any:
    part: Any = pair.decode_worker.runtime
    return part.thread.post(lambda _: part.snapshot()[0])


@pytest.mark.parametrize("allowed", OTHERS)
@pytest.mark.parametrize("differs", OTHERS)
def test_an_option_of_the_workers_allows_other_identities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: str, differs: str
) -> None:
    async def test(pair: Pair, attempt: bytes) -> None:
        if allowed == differs:
            finished = await pair.decode.wait("finished", attempt)
            assert finished.inexact
            assert finished.remote
            assert pair.decode.tokens(attempt) == expected(prompt(60))
            load = await asyncio.wrap_future(snapshot(pair))
            assert load.inexact_handoffs == 1
        else:
            failed = await pair.prefill.wait("failed", attempt)
            assert failed.failure.message.startswith(
                {"weights": "weights bb", "numerics": "numerics id native/avx2 at prefill"}[differs]
            )

    run(monkeypatch, tmp_path, OTHERS[differs], test, **{f"allow_mixed_{allowed}": True})


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_workers_that_seal_their_kv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str
) -> None:
    async def test(pair: Pair, attempt: bytes) -> None:
        finished = await pair.decode.wait("finished", attempt)
        assert (finished.transport, finished.inexact) == (transport, False)
        assert pair.decode.tokens(attempt) == expected(prompt(60))
        for worker in (pair.decode_worker, pair.prefill_worker):
            part: Any = worker.runtime
            assert part.hello.encrypt_kv

    run(monkeypatch, tmp_path, IDENTITY, test, encrypt_kv=True, kv_transport=transport)
