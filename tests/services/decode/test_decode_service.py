"""The decode service over real gRPC: local and remote prompts, choices, drain, metrics, health."""

import asyncio
import hashlib
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fakes.decoder import FakeDecoder, LosableDevice, fake_spec
from fakes.memory_tracer import CLIENT, MemoryTracer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems.cluster_secret import open_channel
from systems.eventually import LIMIT_S, eventually, wait_until
from systems.worker_kit import CARD, Pair, SessionClient, expected, prompt

from pdserve.engine.execution import DeviceLost
from pdserve.engine.kv import decode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.common_pb2_grpc import BlobsStub
from pdserve.protos.worker_pb2_grpc import DecodeStub
from pdserve.services.decode.attempt import ServedAttempt
from pdserve.services.decode.runtime import REFUSED

STEP_S = 0.1  # of a slow model


class Gate:
    """A fake model whose steps wait while the gate is shut."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.opened.set()
        self._inner = FakeDecoder(fake_spec())

    def forward(self, batch: Any, kv: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(LIMIT_S)
        return self._inner.forward(batch, kv)

    def logits(self, hidden: Any) -> Any:
        return self._inner.logits(hidden)

    def states(self, hidden: Any) -> Any:
        return self._inner.states(hidden)


def test_a_local_prompt(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(40), remote=False)
        finished = await pair.decode.wait("finished", attempt)
        kinds = pair.decode.kinds(attempt)
        assert kinds[0] == "admitted"
        assert kinds[-1] == "finished"
        assert not pair.decode.events[0][1].HasField("ticket")
        assert pair.decode.tokens(attempt) == expected(prompt(40))
        assert (finished.remote, finished.transport, finished.epoch) == (False, "", 3)
        assert finished.phases.transfer_s == 0
        assert finished.phases.prefill_s > 0
        last = [m for k, m in pair.decode.events if k == "tokens"][-1]
        assert last.finish == pb.LENGTH
        await pair.at_rest()

    with_pair(test)


@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
def test_a_remote_prompt(with_pair: Callable[..., None], transport: str) -> None:
    async def test(pair: Pair) -> None:
        for _ in range(2):
            attempt = await pair.hand_off(prompt(90))
            finished = await pair.decode.wait("finished", attempt)
            done = await pair.prefill.wait("done", attempt)
            assert pair.prefill.kinds(attempt) == ["accepted", "done"]
            assert pair.decode.tokens(attempt) == expected(prompt(90))
            used = "shm" if transport == "auto" else transport
            assert (finished.remote, finished.transport, done.transport) == (True, used, used)
            phases = finished.phases
            total = phases.queue_s + phases.prefill_s + phases.transfer_s + phases.first_token_s
            assert 0 < total < 10
            assert min(phases.queue_s, phases.prefill_s, phases.transfer_s) >= 0
        assert finished.cached_tokens > 0, "the prefix is warm the second time"
        assert done.sent_bytes < 90 * 32
        await pair.at_rest()
        load = (await snapshot(pair))[0]
        assert load.transports[0].transport == used
        assert load.transports[0].bytes > 0
        assert load.last_command == attempt
        assert load.reserved_idle_block_s > 0, "a hand-off costs decode blocks that wait"
        assert not any(one.count for one in load.refused_frames)
        assert {one.reason for one in load.refused_frames} == {*REFUSED.values()}
        assert load.accounting_errors == 0
        assert set(load.oldest_s.values()) == {0.0}

    with_pair(test, transport)


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_phases_sum_to_the_first_token_and_computing_is_not_queueing(
    with_pair: Callable[..., None], monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """Checks the phase of each step, and that phases of computing contain nothing else."""

    class Slow(FakeDecoder):
        computed: list[tuple[float, float]]  # begin and end of each step, of both workers
        ready: Callable[[], Any]  # checked before the first step

        def forward(self, batch: Any, kv: Any) -> Any:
            if not self.computed:
                wait_until(self.ready)
            began = time.monotonic()
            threading.Event().wait(STEP_S)
            self.computed.append((began, time.monotonic()))
            return super().forward(batch, kv)

    model = Slow(fake_spec())
    model.computed = []
    short = {"max_tokens": 2}
    ended: list[ServedAttempt] = []
    finished_of = ServedAttempt.finished

    def finished(served: ServedAttempt, cached_tokens: int) -> pb.Finished:
        ended.append(served)
        return finished_of(served, cached_tokens)

    monkeypatch.setattr(ServedAttempt, "finished", finished)

    async def test(pair: Pair) -> None:
        thread = pair.decode_worker.runtime.thread  # type: ignore[union-attr]

        def claimed() -> bool:
            """Return whether decode has reserved blocks, so it knows that prefill has begun."""
            return bool(thread.post(lambda e: e.stats().blocks.reserved).result(LIMIT_S))

        model.ready = claimed if remote else (lambda: True)
        for length in (12, 44):  # one chunk, with the workers' first contact; and three
            ended.clear()
            model.computed.clear()
            if remote:
                attempt = await pair.hand_off(prompt(length), params=short)
            else:
                attempt = pair.admit(prompt(length), remote=False, params=short)
            phases = (await pair.decode.wait("finished", attempt)).phases
            (served,) = ended
            total = phases.queue_s + phases.prefill_s + phases.transfer_s + phases.first_token_s
            assert total == pytest.approx(served.first_token - served.arrived)
            chunks = -(-length // 16)
            assert len(model.computed) == chunks + 1 + remote
            prefill, first = model.computed[:chunks], model.computed[chunks]
            assert phases.prefill_s >= sum(end - begin for begin, end in prefill) >= STEP_S * chunks
            assert 0 <= phases.queue_s <= prefill[0][0] - served.arrived, (
                "queueing ends before all computing"
            )
            assert 0 <= phases.transfer_s <= max(0.0, first[0] - prefill[-1][1])
            if remote:
                assert phases.first_token_s >= first[1] - first[0], "a separate step"
            else:
                assert phases.transfer_s == 0
                assert served.first_token <= first[0], "no separate step"
        await pair.at_rest()

    with_pair(test, engine={"model": model})


async def snapshot(pair: Pair) -> Any:
    part: Any = pair.decode_worker.runtime
    return await asyncio.wrap_future(part.thread.post(lambda _: part.snapshot()))


def test_a_request_without_kv_to_send_is_local_even_if_remote_is_requested(
    with_pair: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(pair: Pair) -> None:
        one = pair.admit([5], remote=True)
        monkeypatch.setattr("pdserve.services.decode.convert.SCORES_PER_MESSAGE", 12)
        scored = pair.admit(prompt(30), remote=True, params={"prompt_logprobs": 2})
        for attempt in (one, scored):
            finished = await pair.decode.wait("finished", attempt)
            assert not finished.remote
        parts = [m for kind, m in pair.decode.events if kind == "prompt_logprobs"]
        assert [(m.position, len(m.logprobs)) for m in parts] == [(1, 12), (13, 12), (25, 5)]
        assert all(len(logprob.top_ids) == 2 for m in parts for logprob in m.logprobs)
        await pair.at_rest()

    with_pair(test)


def test_choices_resumes_and_long_prompts_in_parts(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        sampled = {"n": 3, "temperature": 1.0}
        attempt = await pair.hand_off(prompt(50), params=sampled, seed=7)
        await pair.decode.wait("finished", attempt)
        assert pair.decode.tokens(attempt) == expected(prompt(50), seed=7, **sampled)

        whole = expected(prompt(50))[0]
        start = pair.admit(
            prompt(50), remote=False, choices=[pb.ChoiceState(generated_ids=whole[:3])]
        )
        await pair.decode.wait("finished", start)
        first = next(m for k, m in pair.decode.events if k == "tokens" and m.attempt == start)
        ids = [
            i for k, m in pair.decode.events if k == "tokens" and m.attempt == start for i in m.ids
        ]
        assert (first.position, ids) == (3, whole[3:])

        long = pair.admit(prompt(40_000), remote=False)
        failed = await pair.decode.wait("failed", long)
        assert failed.failure.code == pb.CONTEXT_LENGTH_EXCEEDED
        assert "40000" in failed.failure.message

    with_pair(test)


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"params": {"temperature": -1}}, pb.INVALID_ARGUMENT, "temperature"),
        ({"params": {"n": 2}, "choices": [pb.ChoiceState()]}, pb.INVALID_ARGUMENT, "n"),
        ({"params": {"max_tokens": 5000}}, pb.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
    ],
)
def test_invalid_requests_fail_with_their_field(
    with_pair: Callable[..., None], remote: bool, change: dict[str, Any], code: int, param: str
) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(20), remote=remote, **change)
        failed = await pair.decode.wait("failed", attempt)
        assert (failed.failure.code, failed.failure.param, failed.epoch) == (code, param, 3)
        assert pair.decode.kinds(attempt) == ["failed"]
        await pair.at_rest()

    with_pair(test)


def test_an_oversized_or_empty_prompt_part_fails_only_its_request(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        attempt = os.urandom(16)
        empty = pb.IdsPart(key=f"req-{attempt.hex()[:6]}")  # a part without ids is refused
        pair.decode.send(wire.DecodeCommand(ids_part=empty))
        pair.admit([1, 2, 3], remote=False, attempt=attempt)
        failed = await pair.decode.wait("failed", attempt)
        assert (failed.failure.code, failed.epoch) == (pb.OVERLOADED, 3)
        other = pair.admit([1, 2, 3], remote=False)
        assert await pair.decode.wait("finished", other)

    with_pair(test)


def test_requests_beyond_the_promised_blocks_are_busy(with_pair: Callable[..., None]) -> None:
    tracer = MemoryTracer()

    async def test(pair: Pair) -> None:
        attempts = [pair.admit(prompt(60, seed), trace_parent=CLIENT) for seed in range(6)]
        for attempt in attempts[:4]:
            await pair.decode.wait("admitted", attempt)
        for attempt in attempts[4:]:
            await pair.decode.wait("busy", attempt)
        assert (await snapshot(pair))[0].promised_tokens == 256
        for attempt in attempts:
            pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=attempt)))
        again = pair.admit(prompt(60))
        await pair.decode.wait("admitted", again)
        pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=again)))
        await pair.at_rest()
        assert pair.decode_role.core.num_stale == 2, "the busy ones are not stale"

    with_pair(test, engine={"num_blocks": 64}, tracer=tracer)
    declined = [span for span in tracer.ended() if span.events]
    assert [span.events[0].name for span in declined] == ["busy"] * 2
    assert all(span.status.is_unset for span in declined)


def test_many_requests_share_messages(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempts = [pair.admit(prompt(9 + i, i), remote=False) for i in range(8)]
        for i, attempt in enumerate(attempts):
            await pair.decode.wait("finished", attempt)
            assert pair.decode.tokens(attempt) == expected(prompt(9 + i, i))
        assert max(pair.decode.batches) > 1
        assert pair.decode.num_rows == 8 * 7, "all tokens of a choice except the last"
        await pair.at_rest()

    with_pair(test)


def test_drain_lets_running_requests_end(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(30), remote=False, params={"max_tokens": 100})
        await pair.decode.wait("tokens", attempt)
        drained = asyncio.create_task(pair.decode_worker.drain())
        await asyncio.sleep(0)
        late = pair.admit(prompt(30), remote=False)
        failed = await pair.decode.wait("failed", late)
        assert failed.failure.code == pb.UNAVAILABLE
        await asyncio.wait_for(drained, LIMIT_S)
        await pair.decode.wait("finished", attempt)

    with_pair(test)


def test_metrics_on_request(with_pair: Callable[..., None]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def fetch() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())

    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(40), remote=False)
        await pair.decode.wait("finished", attempt)
        texts: list[str] = []

        async def counted() -> bool:
            texts.append(await asyncio.to_thread(fetch))
            return 'generation_tokens_total{model_name="tiny"} 8.0' in texts[-1]

        await eventually(counted, texts)
        worker = pair.decode_worker.address
        assert f'pdserve_kv_blocks{{state="total",worker="{worker}"}} 256.0' in texts[-1]
        assert 'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0' in texts[-1]
        config = 'block_size="4",model_name="tiny",num_gpu_blocks="256"'
        assert f"vllm:cache_config_info{{{config}}} 1.0" in texts[-1]

    with_pair(test, decode_metrics_port=port)


def test_blobs_and_card(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        part: Any = pair.decode_worker.runtime
        card = part.hello.card
        assert card.kv_identity.digest == b"test"
        assert decode_spec(card.kv_spec) == fake_spec()
        async with open_channel(pair.decode_worker.address) as channel:
            blobs = BlobsStub(channel)
            call = blobs.GetBlob(pb.BlobRequest(digest=card.tokenizer_digest))
            chunks = [chunk.data async for chunk in call]
            assert len(chunks) == 3
            assert b"".join(chunks) == CARD.tokenizer_json
            assert hashlib.sha256(CARD.tokenizer_json).hexdigest() == card.tokenizer_digest
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(blobs.GetBlob(pb.BlobRequest(digest="0" * 64))))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    with_pair(test)


def test_a_client_without_credentials_reaches_nothing(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        stranger = SessionClient(DecodeStub, pair.decode_worker.address, "wrong")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stranger.reader
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stranger.close()

    with_pair(test)


def test_a_lost_device_ends_the_process_but_not_its_requests(
    with_pair: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends without a message about the request, so that the router continues it
    elsewhere.
    """
    monkeypatch.setattr("pdserve.services.worker.process.LOOK_S", 0.02)
    device = LosableDevice(lost=True)

    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(30), remote=False)
        await asyncio.wait([pair.decode_worker.failed], timeout=LIMIT_S)
        with pytest.raises(DeviceLost, match="an earlier illegal memory access"):
            pair.decode_worker.failed.result()
        assert device.failures == 1
        assert not {"failed", "finished"} & set(pair.decode.kinds(attempt))
        await pair.decode_worker.stop(0.1)
        assert pair.decode_worker.hung  # so that the process ends without closing what it cannot
        assert pair.decode_worker.runtime is not None
        await asyncio.to_thread(pair.decode_worker.runtime.close)  # this process continues

    with_pair(test, engine={"model": device})


def test_a_frozen_engine_is_not_serving(
    with_pair: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pdserve.services.common.stall_detector.FROZEN_S", 0.4)
    monkeypatch.setattr("pdserve.services.worker.process.LOOK_S", 0.02)
    monkeypatch.setattr("pdserve.services.worker.process.IDLE_LOAD_S", 0.1)
    gate = Gate()

    async def health(pair: Pair) -> int:
        async with grpc.aio.insecure_channel(pair.decode_worker.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return int((await stub.Check(health_pb2.HealthCheckRequest())).status)

    async def until(pair: Pair, status: int) -> None:
        async def has_status() -> bool:
            return await health(pair) == status

        await eventually(has_status, f"health {status}")

    async def test(pair: Pair) -> None:
        serving = health_pb2.HealthCheckResponse
        await until(pair, serving.SERVING)
        gate.opened.clear()
        gate.entered.clear()
        attempt = pair.admit(prompt(30), remote=False)
        await asyncio.to_thread(gate.entered.wait, LIMIT_S)
        await until(pair, serving.NOT_SERVING)
        (record,) = [r for r in caplog.records if "engine is frozen" in r.getMessage()]
        assert "in forward" in record.getMessage(), "the stack of the engine's thread"
        gate.opened.set()
        await until(pair, serving.SERVING)
        await pair.decode.wait("finished", attempt)

    with_pair(test, engine={"model": gate})
