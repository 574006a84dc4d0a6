"""The gateway as a process, with a scripted router behind real gRPC."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import psutil
import pytest
from fakes import tool_server
from fakes.router import FakeRouter, placed, saying, served, tokens
from fakes.router_process import RouterServicer, serve_router
from fakes.tool_model import ToolModel, calls
from systems.chaos.cluster import lasting_port
from systems.cluster_secret import SECRET
from systems.eventually import LIMIT_S, eventually

from pdserve.cli.http_client import ApiClient
from pdserve.gateway.main import make_text_limits, run
from pdserve.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
PROGRAM = """
import json, sys
for name in ("torch", "transformers", "numpy"):
    sys.modules[name] = None  # a gateway must not need them
from pdserve.gateway.main import run
from pdserve.gateway.settings import GatewaySettings
def report(event, figures):
    print(json.dumps([event, figures]), flush=True)
sys.exit(run(GatewaySettings(**json.loads(sys.argv[1])), report))
"""


class Gateway:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.url = ""
        self.log = ""

    async def event(self) -> tuple[str, dict[str, str]]:
        assert self.process.stdout is not None
        name, figures = json.loads(await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S))
        return name, figures

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def ended(self) -> int:
        _, log = await asyncio.wait_for(self.process.communicate(), LIMIT_S)
        self.log = log.decode()
        return int(self.process.returncode or 0)


async def launch(**settings: object) -> Gateway:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, json.dumps(settings),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    return Gateway(process)


@pytest.fixture
async def servicer(anyio_backend) -> AsyncIterator[tuple[RouterServicer, str]]:
    servicer, host, address = await serve_router(FakeRouter(saying("hello world", cached=2)))
    yield servicer, address
    await host.stop(0)


@pytest.fixture
async def gateway(servicer) -> AsyncIterator[Gateway]:
    gateway = await launch(port=0, routers=[servicer[1]], cluster_secret=(SECRET,))
    name, figures = await gateway.event()
    assert name == "listening"
    gateway.url = figures["url"]
    yield gateway
    if gateway.process.returncode is None:
        gateway.process.kill()
        await gateway.ended()


async def test_a_unix_socket(servicer, tmp_path):
    path = tmp_path / "api"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # the socket file is left behind
    settings = {"routers": [servicer[1]], "cluster_secret": (SECRET,), "unix_socket": str(path)}
    gateway = await launch(port=0, **settings)
    assert (await gateway.event())[1]["unix"] == str(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (await gateway.event())[0] == "ready"
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    for host, status in (("localhost", 200), ("evil.example", 403)):
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            reply = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
            assert reply.status_code == status
    client = ApiClient(f"unix:{path}")
    assert (await asyncio.to_thread(client.get_json, "/v1/models"))["data"][0]["id"] == "tiny"
    other = await launch(port=0, **settings)
    assert await other.ended() == 1
    assert "another server listens on this path" in other.log
    assert await gateway.stop() == 0
    assert not path.exists()


async def test_from_start_to_stop(gateway):
    used = psutil.Process(gateway.process.pid).cpu_times()
    assert used.user + used.system < 5  # seconds of a core; about 0.6 on an idle machine
    assert (await gateway.event())[0] == "ready"
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http:
        assert (await http.get("/ready")).json()["models"] == ["tiny"]
        headers = {"x-request-id": "mine"}
        reply = await http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HI}, headers=headers
        )
        assert reply.json()["choices"][0]["message"]["content"] == "hello world"
        assert reply.headers["x-request-id"] == "mine"
        metrics = (await http.get("/metrics")).text
    assert 'vllm:generation_tokens_total{model_name="tiny"}' in metrics
    assert await gateway.stop() == 0
    request = f"request={reply.json()['id']}"
    (line,) = (line for line in gateway.log.splitlines() if request in line)
    message = line.partition("gateway  ")[2]
    assert re.fullmatch(
        r"POST /v1/chat/completions 200 model=tiny prompt=\d+ completion=6 prefill_at=local "
        rf"ttft=\d\.\d{{3}}s total=\d\.\d{{3}}s finish=stop  {request}",
        message,
    ), message
    assert len(message) <= 200
    assert "Traceback" not in gateway.log


async def test_json_logs(anyio_backend):
    """Include the log of the tokenizer workers, which warn here about an unusual default of the
    model."""
    card, blobs = served(generation={"temperature": 99.0})
    router = FakeRouter(saying("hello world"), [card], blobs)
    _, host, address = await serve_router(router)
    port = lasting_port()
    words = ("gateway", "--port", str(port), "--routers", address, "--log-format", "json")
    words += ("--log-level", "debug", "--admin-api-key", "operator")
    gateway = Gateway(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdserve.cli.main", *words),
            env={**os.environ, "PDSERVE_CLUSTER_SECRET": SECRET},
            stderr=asyncio.subprocess.PIPE,
        )
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as http:

        async def is_ready() -> bool:
            with suppress(httpx.ConnectError):
                return (await http.get("/ready")).status_code == 200
            return False

        await eventually(is_ready)
        reply = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
        ended = await http.post("/shutdown", headers={"x-api-key": "operator"})
        assert (ended.status_code, ended.json()) == (200, {"status": "shutting down"})
    assert await gateway.ended() == 0
    await host.stop(0)
    lines = [json.loads(line) for line in gateway.log.splitlines()]
    (answered,) = (line for line in lines if "finish=stop" in line["message"])
    assert answered["request_id"] == reply.json()["id"]
    (details,) = (line for line in lines if line["message"].startswith("request details: "))
    assert details["request_id"] == reply.json()["id"]
    assert "queue=0.010s prefill=0.020s" in details["message"]
    assert f"header_id={reply.headers['x-request-id']} decode=d:1" in details["message"]
    assert answered["logger"] == "pdserve.gateway.request"
    (warning,) = (line for line in lines if line["component"] == "tokenizer")
    assert "temperature" in warning["message"]


async def test_the_operator_ends_the_server(servicer, gateway):
    """Accept the admin key alone, which opens nothing else; without one there is no route."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http:
        assert (await http.post("/shutdown")).status_code == 404
    keys = {"api_keys": ("client",), "admin_api_key": "operator"}
    operated = await launch(port=0, routers=[servicer[1]], cluster_secret=(SECRET,), **keys)
    _, figures = await operated.event()
    assert (await operated.event())[0] == "ready"
    async with httpx.AsyncClient(base_url=figures["url"], timeout=LIMIT_S) as http:
        for method, path, key, status in (
            ("POST", "/shutdown", "", 401),
            ("POST", "/shutdown", "client", 401),
            ("GET", "/shutdown", "operator", 405),
            ("GET", "/v1/models", "operator", 401),
            ("GET", "/health/live", "", 200),
            ("GET", "/health/ready", "", 200),
            ("POST", "/shutdown", "operator", 200),
        ):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            reply = await http.request(method, path, headers=headers)
            assert reply.status_code == status, (method, path, reply.text)
            assert reply.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
            if path == "/shutdown" and status == 401:
                refused = f"request={reply.headers['x-request-id']}"
    accepted = f"request={reply.headers['x-request-id']}"
    assert await operated.event() == ("shutdown", {})
    assert await operated.stop() == 0
    (warning,) = (line for line in operated.log.splitlines() if refused in line)
    assert "WARN" in warning
    (line,) = (line for line in operated.log.splitlines() if accepted in line)
    assert "POST /shutdown with the admin key" in line


async def test_every_api_is_mounted(gateway):
    """Send turns that exercise every field passed to the tokenizer workers."""
    await gateway.event()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"role": "user", "content": "hi"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    turns = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
    ]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http:
        reply = await http.post("/v1/responses", json={"model": "tiny", "input": items})
        assert reply.json()["output"][0]["content"][0]["text"] == "hello world", reply.text
        body = {"model": "tiny", "max_tokens": 99, "messages": turns}
        reply = await http.post("/v1/messages", json=body)
        assert reply.json()["content"][0]["text"] == "hello world", reply.text
        counted = await http.post("/v1/messages/count_tokens", json=body)
        usage = reply.json()["usage"]
        prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert counted.json() == {"input_tokens": prompt_tokens}
    assert await gateway.stop() == 0


async def test_rate_limits_are_set_by_the_options(servicer):
    limited = {"requests_per_minute": 2, "tokens_per_minute": 1000}
    gateway = await launch(port=0, routers=[servicer[1]], cluster_secret=(SECRET,), **limited)
    gateway.url = (await gateway.event())[1]["url"]
    await gateway.event()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http:
        replies = [
            await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
            for _ in "abc"
        ]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
    assert replies[0].headers["x-ratelimit-limit-tokens"] == "1000"
    assert await gateway.stop() == 0


def test_text_limits_are_set_by_the_options():
    settings = GatewaySettings(text_memory_mb=32, text_load_memory_mb=100, text_timeout_s=1.0)
    limits = make_text_limits(settings, 1.0)
    assert (limits.prompt_bytes, limits.load_bytes) == (32 << 20, 100 << 20)
    assert (limits.prompt_s, limits.render_s, limits.late_s) == (1.0, 1.0, 2.0)
    assert make_text_limits(GatewaySettings(), 1.0).render_s == 1.5


@pytest.mark.parametrize(
    "broken",
    [
        "pdserve.services.common.discovery.resolve",
        "pdserve.gateway.readiness.Readiness.models",
    ],
)
def test_the_gateway_exits_when_a_task_fails(broken, monkeypatch, capsys):
    def fail(*args):
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr(broken, fail)
    settings = GatewaySettings(
        port=0, routers=("127.0.0.1:1",), cluster_secret=(SECRET,), log_level="warning"
    )
    assert run(settings) == 1
    assert "nobody foresaw this" in capsys.readouterr().err


async def test_a_stop_lets_open_requests_finish(servicer, gateway):
    hold = asyncio.Event()

    async def play(router, start):
        yield placed(start)
        await hold.wait()
        async for event in saying("hello")(router, start):
            yield event

    servicer[0].router.play = play
    assert (await gateway.event())[0] == "ready"
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        request = asyncio.create_task(
            http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
        )
        await eventually(lambda: servicer[0].router.starts)
        gateway.process.send_signal(signal.SIGTERM)

        async def stopping() -> bool:
            return (await http.get("/ready")).status_code != 200

        await eventually(stopping)
        refused = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
        assert refused.status_code == 503
        hold.set()
        assert (await request).json()["choices"][0]["message"]["content"] == "hello"
    assert await gateway.ended() == 0


async def test_new_requests_are_accepted_during_the_lame_duck_period(servicer):
    gateway = await launch(
        port=0, routers=[servicer[1]], cluster_secret=(SECRET,), lame_duck_s=3.0, drain_s=10.0
    )
    _, figures = await gateway.event()
    assert (await gateway.event())[0] == "ready"
    async with httpx.AsyncClient(base_url=figures["url"], timeout=20) as http:
        gateway.process.send_signal(signal.SIGTERM)

        async def stopping() -> bool:
            return (await http.get("/ready")).status_code != 200

        await eventually(stopping)
        late = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
        assert late.json()["choices"][0]["message"]["content"] == "hello world"
    assert gateway.process.returncode is None
    assert await gateway.ended() == 0


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.extended)])
async def test_without_a_drain_time_it_exits_at_once(servicer, stream):
    """Exit well before the default of 30 seconds for open requests, even on a busy machine."""

    async def play(router, start):
        yield placed(start)
        yield tokens(start, router.encode("hello"), 0)
        await asyncio.Event().wait()

    servicer[0].router.play = play
    gateway = await launch(port=0, routers=[servicer[1]], cluster_secret=(SECRET,), drain_s=0.0)
    _, figures = await gateway.event()
    assert (await gateway.event())[0] == "ready"
    async with httpx.AsyncClient(base_url=figures["url"], timeout=LIMIT_S) as http:
        body = {"model": "tiny", "messages": HI, "stream": stream}
        request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await eventually(lambda: servicer[0].router.starts)
        began = time.monotonic()
        assert await gateway.stop() == 0
        assert time.monotonic() - began < 10.0
        await asyncio.gather(request, return_exceptions=True)


async def test_a_disconnect_cancels_at_the_router(servicer, gateway):
    async def play(router, start):
        yield placed(start)
        await asyncio.Event().wait()

    servicer[0].router.play = play
    assert (await gateway.event())[0] == "ready"
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http:
        request = asyncio.create_task(
            http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
        )
        await eventually(lambda: servicer[0].router.starts)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        left = await asyncio.wait_for(servicer[0].cancelled.get(), LIMIT_S)
    assert left == servicer[0].router.starts[0].request
    assert await gateway.stop() == 0
    assert "finish=CANCELLED" in gateway.log


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)]
)
async def test_a_tool_program_is_called_and_exits_with_the_gateway(end, tmp_path):
    model = ToolModel(calls("tools__add", '{"a": 40, "b": 2}'), "It is 42.")
    _, host, address = await serve_router(model)
    notes, config = tmp_path / "notes", tmp_path / "mcp.json"
    server = {
        "command": sys.executable, "args": ["-P", tool_server.__file__, str(notes), "x"],
        "env": {"SOME": "s3cret"}, "autoApprove": ["add"],
    }  # fmt: skip
    config.write_text(json.dumps({"mcpServers": {"tools": server}}))
    settings = {"cluster_secret": (SECRET,), "drain_s": 0.0, "mcp_config": str(config)}
    settings["log_level"] = "debug"  # shows calls
    gateway = await launch(port=0, routers=[address], **settings)
    _, figures = await gateway.event()
    await gateway.event()  # ready, whether or not the program is
    async with httpx.AsyncClient(base_url=figures["url"], timeout=LIMIT_S) as http:

        async def answer() -> str:
            model.starts.clear()
            body = {"model": "tiny", "messages": HI}
            response = await http.post("/v1/chat/completions", json=body)
            return str(response.json()["choices"][0]["message"]["content"])

        await eventually(lambda: _is(answer, "It is 42."))
        page = (await http.get("/metrics")).text
    counted = 'pdserve_mcp_calls_total{outcome="ok",server="tools",tool="add"} 1.0'
    assert counted in page
    child = psutil.Process(int(notes.read_text().split()[0]))
    gateway.process.send_signal(end)
    await gateway.ended()
    await eventually(lambda: not child.is_running())
    assert "tools add: ok in" in gateway.log
    assert "s3cret" not in gateway.log
    await host.stop(0)


async def _is(request, wanted: str) -> bool:
    return await request() == wanted


async def test_an_invalid_server_file_is_named(tmp_path):
    config = tmp_path / "mcp.json"
    config.write_text('{"mcpServers": {"a": {"comand": "x"}}}')
    settings = {"cluster_secret": (SECRET,), "mcp_config": str(config)}
    gateway = await launch(port=0, routers=["127.0.0.1:1"], **settings)
    assert await gateway.ended() != 0
    assert f"--mcp-config {config}: unknown key mcpServers.a.comand" in gateway.log


async def test_without_a_router_it_is_healthy_but_not_ready(anyio_backend):
    gateway = await launch(port=0, routers=["127.0.0.1:1"], cluster_secret=(SECRET,))
    _, figures = await gateway.event()
    async with httpx.AsyncClient(base_url=figures["url"], timeout=LIMIT_S) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        reply = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
    assert await gateway.stop() == 0


async def test_ipv6(servicer):
    gateway = await launch(port=0, host="::1", routers=[servicer[1]], cluster_secret=(SECRET,))
    _, figures = await gateway.event()
    async with httpx.AsyncClient(base_url=figures["url"], timeout=LIMIT_S) as http:
        assert (await http.get("/health")).status_code == 200
    assert await gateway.stop() == 0


async def test_a_busy_port_is_named(anyio_backend):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gateway = await launch(port=port, routers=["127.0.0.1:1"], cluster_secret=(SECRET,))
        assert await gateway.ended() == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in gateway.log
