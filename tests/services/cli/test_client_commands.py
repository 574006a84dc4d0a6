"""chat, models and health against a small HTTP server and a real gRPC health service."""

import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.services.cli.chat import Conversation, talk
from pdserve.services.cli.http_client import ApiClient, ApiError
from pdserve.services.cli.main import main
from pdserve.services.options.settings import ChatSettings


class Server(ThreadingHTTPServer):
    """Answers as the gateway would; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.events: list[str] = []
        self.models: list[dict[str, Any]] = [{"id": "tiny"}]
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization", ""))
        if self.path == "/v1/models":
            self.reply(200, {"data": self.server.models})
        elif self.path == "/ready":
            self.reply(503, {"error": {"message": "no decode worker is live yet"}})
        else:
            self.reply(404, "plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if body.get("model") == "unknown":
            self.reply(404, {"error": {"message": "the model 'unknown' does not exist"}})
            return
        self.send_response(200)
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(f": comment\n\ndata: {event}\n\n".encode())

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def says(*texts: str) -> list[str]:
    return [json.dumps({"choices": [{"delta": {"content": t}}]}) for t in texts]


def conversation(server: Server, **settings: Any) -> tuple[Conversation, io.StringIO]:
    out = io.StringIO()
    return Conversation(ApiClient(server.url), "tiny", ChatSettings(**settings), out), out


def test_a_conversation_keeps_its_history(server: Server) -> None:
    server.events = [*says("Hel", "lo"), '{"choices": [], "usage": {}}', "[DONE]"]
    chat, out = conversation(server, system="be brief", temperature=0.0, max_tokens=9)
    assert talk(chat, ["hi", "", "again"], out) == 0
    assert out.getvalue() == "Hello\nHello\n"
    first, second = server.asked
    roles = [m["role"] for m in second["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "Hello"
    assert (first["temperature"], first["max_tokens"], first["stream"]) == (0.0, 9, True)


def test_commands_of_a_conversation(server: Server) -> None:
    server.events = [*says("x"), "[DONE]"]
    chat, out = conversation(server)
    lines = ["one", "/system be kind", "/reset", "/dance", "/help", "two", "/exit", "three"]
    assert talk(chat, lines, out) == 0
    assert [m["content"] for m in server.asked[-1]["messages"]] == ["be kind", "two"]
    assert len(server.asked) == 2
    assert "/dance is unknown" in out.getvalue()
    assert "temperature" not in server.asked[0]


def test_a_question_that_fails_is_forgotten(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = ['{"error": {"message": "the worker went away"}}']
    chat, out = conversation(server)
    assert talk(chat, ["hi"], out) == 1
    assert "the worker went away" in capsys.readouterr().err
    assert chat.messages == []
    server.events = says("half an ans")  # and then the connection ends
    assert talk(chat, ["hi"], out) == 1
    assert "broke off" in capsys.readouterr().err
    assert chat.messages == []


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:9" in err
    assert "pdserve up" in err


def test_chat_reads_from_a_pipe(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.events = [*says("fine"), "[DONE]"]
    monkeypatch.setattr("sys.stdin", io.StringIO("how are you\n"))
    assert main(["chat", "--url", server.url, "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "fine\n"
    assert server.asked[0]["model"] == "tiny"
    assert server.keys == ["Bearer k"]


def test_models(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_errors_of_the_client(server: Server) -> None:
    client = ApiClient(server.url)
    with pytest.raises(ApiError, match="'unknown' does not exist") as caught:
        client.post_json("/v1/chat/completions", {"model": "unknown"})
    assert caught.value.status == 404
    with pytest.raises(ApiError, match="404"):
        client.get("/nowhere")
    server.events = ["not json"]
    with pytest.raises(ApiError, match="JSON"):
        list(client.stream("/v1/chat/completions", {}))
    for url in ("ftp://x", "http://", ""):
        with pytest.raises(ApiError, match="URL"):
            ApiClient(url)


def test_health_over_http(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
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
