"""`models` and `health` against a small HTTP server and a real gRPC health service."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from fakes.api_server import ApiServer, api_server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.cli.commands import STOPPED
from pdserve.cli.http_client import ApiClient, ApiError
from pdserve.cli.main import main


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as made:
        yield made


def test_models(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = [
        {
            "id": "SmolLM2-135M-Instruct",
            "architecture": "LlamaForCausalLM",
            "max_model_len": 8192,
            "quantization": "Q4_1",
            "kv_identity": "0123456789abcdef" * 2,
            "numerics_id": "reference-cpu-float32",
        },
        {"id": "other"},
    ]
    assert main(["models", "--url", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "model"
    assert lines[1].split() == [
        "SmolLM2-135M-Instruct",
        "LlamaForCausalLM",
        "8192",
        "Q4_1",
        "0123456789ab",
        "reference-cpu-float32",
    ]
    assert lines[2].split() == ["other", "-", "-", "-", "-", "-"]


def test_models_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--url", "http://127.0.0.1:9"]) == 1
    assert "pdserve up" in capsys.readouterr().err


def test_errors_of_the_client(server: ApiServer) -> None:
    client = ApiClient(server.url)
    with pytest.raises(ApiError, match="'unknown' does not exist") as caught:
        client.post_json("/v1/chat/completions", {"model": "unknown"})
    assert caught.value.status == 404
    with pytest.raises(ApiError, match="404"):
        client.get("/nowhere")
    server.events = ["not json"]
    with pytest.raises(ApiError, match="JSON"):
        list(client.stream("/v1/chat/completions", {}))


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "", "http://h:99999", "http://h:x", "http://a..b", "http://[::"]
)
def test_invalid_urls_of_a_server_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "models", "bench", "top"):
        assert main([command, "--url", url]) == 1
        assert f"{url!r} is not the URL of a server; check --url" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_key_that_no_header_can_carry_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--api-key", "clé\nX: 1"]) == 1
    assert "--api-key" in capsys.readouterr().err


def test_ctrl_c_ends_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(client: ApiClient, path: str) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(ApiClient, "get", interrupted)
    assert main(["chat"]) == STOPPED


def test_health_over_http(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", server.url + "/v1/models"]) == 0
    assert main(["health", server.url + "/ready"]) == 1
    assert "no decode worker is live yet" in capsys.readouterr().err


def test_health_over_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert main(["health", f"127.0.0.1:{port}"]) == 0
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert main(["health", f"127.0.0.1:{port}"]) == 1
        assert "NOT_SERVING" in capsys.readouterr().err
    finally:
        server.stop(None).wait()
    assert main(["health", f"127.0.0.1:{port}", "--timeout", "0.5"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
