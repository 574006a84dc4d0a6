"""The demo's checks: it fails unless answer, log and metrics agree."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import demo
from pdserve.cli.http_client import ApiClient


class Gateway(ThreadingHTTPServer):
    """A gateway that answers, and reports configured values in its metrics and log."""

    daemon_threads = True

    def __init__(self, log: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.log = log
        self.answer = "The fox."
        self.says = "tcp"  # in the log
        self.counts = "remote"  # in the metrics
        self.sends = 5e6
        self.totals = {"local": 3.0, "remote": 4.0}
        self.bytes = 1e6


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        gateway = self.server
        lines = [
            f'pdserve_prefill_requests_total{{where="{where}"}} {total}'
            for where, total in gateway.totals.items()
        ]
        lines.append(f'pdserve_transfer_bytes_total{{transport="tcp",worker="w"}} {gateway.bytes}')
        self.reply("# HELP x y\n" + "\n".join(lines) + "\n")

    def do_POST(self) -> None:
        gateway = self.server
        self.rfile.read(int(self.headers["Content-Length"]))
        gateway.totals[gateway.counts] += 1
        gateway.bytes += gateway.sends
        with gateway.log.open("a") as out:
            out.write("other prefill_at=shm\n")
            out.write(f"INFO gateway chatcmpl-1 prompt=600 prefill_at={gateway.says} ttft=1s\n")
        message = {"message": {"content": gateway.answer}}
        usage = {"prompt_tokens": 600}
        self.reply(json.dumps({"id": "chatcmpl-1", "choices": [message], "usage": usage}))

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(demo, "SETTLE_S", 0.3)
    log = tmp_path / "log"
    log.touch()
    with Gateway(log) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(gateway: Gateway, wanted: str = "tcp") -> None:
    client = ApiClient(f"http://127.0.0.1:{gateway.server_address[1]}")
    demo.ask(client, gateway.log, "m", "long", "Which animal?", wanted)


def test_the_demo_passes_when_all_agree(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(gateway)
    out = capsys.readouterr().out
    assert "600 prompt tokens, prefilled remotely over tcp" in out
    assert "remote +1, 5.0 MB" in out
    gateway.says, gateway.counts, gateway.sends = "local", "local", 0.0
    gateway.log.write_text("")
    ask(gateway, "local")
    assert "by the decode worker" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("claim", "value", "complaint"),
    [
        ("answer", "  ", "is empty"),
        ("says", "local", "log says"),
        ("says", "shm", "log says"),
        ("counts", "local", "/metrics after"),
        ("sends", 0.0, "/metrics after"),
    ],
)
def test_the_demo_fails_on_each_disagreement(
    gateway: Gateway, claim: str, value: object, complaint: str
) -> None:
    setattr(gateway, claim, value)
    with pytest.raises(demo.DemoError, match=complaint):
        ask(gateway)


def test_a_missing_log_line_is_an_error(gateway: Gateway) -> None:
    with pytest.raises(demo.DemoError, match="no line for request unheard"):
        demo.read_prefill_at(gateway.log, "unheard")
