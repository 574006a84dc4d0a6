"""Two gateway processes on one port: clients see one gateway."""

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from fakes.router import Event, FakeRouter, finished, placed, saying, tokens
from fakes.router_process import RouterServicer, serve_router
from prometheus_client.parser import text_string_to_metric_families
from systems.eventually import eventually
from systems.gateway_workers import GatewayWorkers

from pdserve.cli.up.gateway_workers import GatewayWorkers as Parent
from pdserve.gateway.http.body import MAX_VALUES, VALUE_BYTES
from pdserve.gateway.listener import ConnectionCounts
from pdserve.gateway.main import divided
from pdserve.gateway.settings import GatewaySettings
from pdserve.protos import common_pb2 as pb
from pdserve.protos.text_pb2 import ChatMessage, ChatRequest
from pdserve.protos.text_pb2_grpc import TextStub
from pdserve.services.common.auth.certificates import Role, issue, make_authority

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEYS = ("one", "two", "three", "four", "five")
LIMIT = 9


@pytest.fixture(scope="module")
async def servicer(one_loop: None) -> AsyncIterator[tuple[RouterServicer, str]]:
    servicer, host, address = await serve_router(FakeRouter(saying("hello world", cached=2)))
    yield servicer, address
    await host.stop(0)


@pytest.fixture(scope="module")
async def gateway(
    servicer: tuple[RouterServicer, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayWorkers]:
    folder = tmp_path_factory.mktemp("workers")
    (folder / "keys").write_text("of a file\n")
    words = [word for key in KEYS for word in ("--api-key", key)]
    words += ["--requests-per-minute", str(LIMIT), "--open-metrics"]
    words += ["--otlp-traces-sample", "0.5", "--api-key-file", f"{folder}/keys"]
    words += ["--database-url", f"sqlite:///{folder}/gateway.db"]
    async with GatewayWorkers(servicer[1], folder, *words) as gateway:
        yield gateway


class Streams:
    """A model that plays "hello", and the rest once released."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def play(self, router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        yield placed(start)
        yield tokens(start, router.encode("hello"), 0)
        await self.go_on.wait()
        yield tokens(start, router.encode(" world"), 1, finish=pb.STOP)
        yield finished(start)


async def begin(held: AsyncExitStack, client: httpx.AsyncClient) -> AsyncIterator[str]:
    """The lines of a stream after its first token."""
    request = client.stream("POST", CHAT, json=BODY | {"stream": True})
    lines = (await held.enter_async_context(request)).aiter_lines()
    async for line in lines:
        if "hello" in line:
            break
    return lines


def test_limits_are_divided() -> None:
    """Any single process still accepts every request that one process would accept."""
    whole = GatewaySettings()
    part = divided(whole, 4)
    for name in ("max_requests", "max_unanswered", "max_answers_bytes", "batch_concurrency"):
        assert getattr(part, name) == getattr(whole, name) // 4
    assert part.text_processes == 1
    assert part.max_bodies_bytes == whole.max_body_bytes + MAX_VALUES * VALUE_BYTES
    few = GatewaySettings(max_requests=2, max_bodies_bytes=1 << 20)
    assert divided(few, 4).max_requests == 1
    assert divided(few, 4).max_bodies_bytes == 1 << 20
    assert divided(whole, 1) == whole


def test_a_restarted_process_has_no_turn_until_it_is_ready(tmp_path: Path) -> None:
    with Parent(GatewaySettings(port=0, grpc_port=0), 2, tmp_path) as parent:
        dead, other = (
            ConnectionCounts(parent.task(index).args[1].counts_file, index, 2) for index in range(2)
        )
        for counts in (dead, other):
            counts.set_ready()
        other.add(1)
        assert other.fewer()
        parent.task(0)
        assert not other.fewer()


async def test_a_few_connections_are_spread(gateway: GatewayWorkers) -> None:
    """Check only that both get some: a busy process may miss its turn.
    tests/gateway/http/test_listener.py tests how evenly."""
    async with AsyncExitStack() as held:
        for _ in range(10):
            client = await held.enter_async_context(gateway.client())
            assert (await client.get("/health")).status_code == 200
        assert min(len(ports) for ports in gateway.connections().values()) >= 2


async def test_state_is_shared_by_both_processes(gateway: GatewayWorkers) -> None:
    async with gateway.both("one") as (first, second):
        answer = await first.post(CHAT, json=BODY)
        name = answer.json()["id"]
        kept = await first.post("/v1/responses", json={"model": "tiny", "input": "hi"})
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", b"{}")}
        file = (await first.post("/v1/files", files=form)).json()
        for client in (first, second):
            assert (await client.get("/v1/files")).json()["data"] == [file]
            trace = (await client.get(f"/v1/traces/{name}")).json()
            assert (trace["id"], trace["state"], trace["model"]) == (name, "ended", "tiny")
            ended = (await client.get("/fleet/state")).json()["ended"]
            assert [one["id"] for one in ended] == [kept.json()["id"], name]
            found = await client.get(f"/v1/responses/{kept.json()['id']}")
            assert found.json()["output"] == kept.json()["output"]
        second.headers["authorization"] = "Bearer two"
        assert (await second.get(f"/v1/traces/{name}")).status_code == 404


async def test_a_limit_of_a_key_holds_over_both(gateway: GatewayWorkers) -> None:
    async with gateway.both("three") as (first, second):
        answers = [await client.post(CHAT, json=BODY) for client in (first, second) * 6]
        assert [answer.status_code for answer in answers] == [200] * LIMIT + [429] * 3
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert left[:LIMIT] == [str(LIMIT - n) for n in range(1, LIMIT + 1)]


async def test_both_record_the_same_traces(
    servicer: tuple[RouterServicer, str], gateway: GatewayWorkers
) -> None:
    starts = servicer[0].router.starts
    async with gateway.both("five") as clients:
        for _ in range(LIMIT // 2):
            body = {"traceparent": f"00-{os.urandom(16).hex()}-b7ad6b7169203331-01"}
            for client in clients:
                assert (await client.post(CHAT, json=BODY, headers=body)).status_code == 200
            assert starts[-2].trace_parent == starts[-1].trace_parent


async def test_sighup_reloads_the_keys_of_both(gateway: GatewayWorkers) -> None:
    gateway.process.send_signal(signal.SIGHUP)
    await eventually(lambda: gateway.log().count("keys: 1 API keys loaded") == 2, gateway.log)


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    page = (await client.get("/metrics?fleet=false")).text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    found = {s.name: s.value for s in samples if not s.labels.keys() - {"model_name"}}
    waiting = {s.labels["state"]: s.value for s in samples if "state" in s.labels}
    assert len(samples) == len({(s.name, *s.labels.items()) for s in samples})
    return found | {f"requests {state}": value for state, value in waiting.items()}


async def test_a_crash_ends_only_streams_of_that_process(
    servicer: tuple[RouterServicer, str], gateway: GatewayWorkers
) -> None:
    """Metrics are sums that continue where they were."""
    router, streams = servicer[0].router, Streams()
    usual = router.play
    count = "vllm:e2e_request_latency_seconds_count"
    async with AsyncExitStack() as held:
        first, second = await held.enter_async_context(gateway.both("two"))
        for client in (first, second):
            assert (await client.post(CHAT, json=BODY)).status_code == 200
        router.play = streams.play
        before = await figures(first)
        assert before[count] == before["vllm:time_to_first_token_seconds_count"] >= 2
        lost, kept = await begin(held, first), await begin(held, second)
        for _ in range(2):  # one for each process, whose connections have streams
            other = await held.enter_async_context(gateway.client())
            assert (await figures(other))["requests open"] == 2
        worker = gateway.workers()["gateway 0"]
        worker.kill()
        with pytest.raises(httpx.TransportError):
            [line async for line in lost]
        router.play = usual
        for _ in range(3):  # while it is down, and while it restarts
            async with gateway.client("four") as other:
                assert (await other.post(CHAT, json=BODY)).status_code == 200
        streams.go_on.set()
        assert [line for line in [line async for line in kept] if " world" in line]
        await eventually(lambda: gateway.num_ready == 3, gateway.log)
        assert gateway.workers()["gateway 0"].pid != worker.pid
    assert "gateway 0 ended (signal 9)" in gateway.log()
    async with gateway.both("four") as (first, second):
        assert (await first.post(CHAT, json=BODY)).status_code == 200
        for client in (first, second):
            now = await figures(client)
            assert now[count] == before[count] + 5
            assert now["requests open"] == 0


async def test_grpc_is_served_by_both(gateway: GatewayWorkers) -> None:
    port = int(gateway.grpc.rpartition(":")[2])
    for name, worker in gateway.workers().items():
        listening = [c for c in worker.net_connections("tcp") if c.status == "LISTEN"]
        assert port in [conn.laddr.port for conn in listening], name
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        request = ChatRequest(messages=[ChatMessage(role="user", content="hi")])
        metadata = (("authorization", "Bearer four"),)
        chunks = [chunk async for chunk in TextStub(channel).Chat(request, metadata=metadata)]
    assert "".join(chunk.text for chunk in chunks) == "hello world"


async def test_a_stop_drains_both(servicer: tuple[RouterServicer, str], tmp_path: Path) -> None:
    """Stop with TLS and a Unix socket."""
    authority = make_authority()
    identity = issue(authority, Role.GATEWAY)
    files = {"--tls-cert": identity.certificate, "--tls-key": identity.key}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    words = [word for name in files for word in (name, str(tmp_path / name))]
    unix, router, streams = tmp_path / "api", servicer[0].router, Streams()
    async with GatewayWorkers(servicer[1], tmp_path, *words, "--unix-socket", str(unix)) as gateway:
        transport = httpx.AsyncHTTPTransport(uds=str(unix))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
        usual, router.play = router.play, streams.play
        async with AsyncExitStack() as held:
            clients = await held.enter_async_context(gateway.both(verify=_trusting()))
            running = [await begin(held, client) for client in clients]
            gateway.process.send_signal(signal.SIGTERM)
            await eventually(lambda: gateway.log().count("SIGTERM: draining") == 2)
            assert not gateway.listens()
            streams.go_on.set()
            for lines in running:
                assert [line for line in [line async for line in lines] if " world" in line]
        router.play = usual
        assert await gateway.ended() == 0
        assert not unix.exists()


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def test_a_process_that_cannot_start_is_reported(tmp_path: Path) -> None:
    gateway = GatewayWorkers("127.0.0.1:1", tmp_path, "--api-key-file", f"{tmp_path}/none")
    await gateway.start()
    assert await gateway.ended() == 1
    *_, last = gateway.log().splitlines()
    assert last.startswith("pdserve: gateway ")
    assert "could not start: [Errno 2] No such file or directory" in last
