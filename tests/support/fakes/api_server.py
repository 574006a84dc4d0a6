"""A small HTTP server that answers as the gateway would, and records its requests."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STALL = "STALL"  # in place of an event: the answer stops here until `go_on` is set
CONTEXT_FULL = {"error": {"message": "too long", "code": "context_length_exceeded"}}

# Returns the answer to a body: (status, JSON)
Reply = Callable[[dict[str, Any]], tuple[int, Any]]


class ApiServer(ThreadingHTTPServer):
    """Streams `events` to each POST, unless `reply` answers it; with `key` it requires that key."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.events: list[str] = []
        self.models: list[dict[str, Any]] = [{"id": "tiny"}]
        self.key = ""
        self.metrics = ""
        self.reply: Reply | None = None
        self.go_on = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that leaves."""


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        if not self.may_ask():
            return
        if self.path == "/v1/models":
            self.send(200, {"data": self.server.models})
        elif self.path == "/metrics?fleet=true":
            self.send_text(200, self.server.metrics)
        elif self.path == "/ready":
            self.send(503, {"error": {"message": "no decode worker is live yet"}})
        else:
            self.send(404, "plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.may_ask():
            return
        self.server.requests.append(body)
        if body.get("model") == "unknown":
            self.send(404, {"error": {"message": "the model 'unknown' does not exist"}})
        elif self.server.reply:
            self.send(*self.server.reply(body))
        elif self.path == "/tokenize":
            self.send(404, "plain")
        else:
            self.stream()

    def stream(self) -> None:
        self.send_response(200)
        self.end_headers()
        for event in list(self.server.events):
            if event == STALL:
                self.server.go_on.wait(60)
            else:
                self.wfile.write(f": comment\n\ndata: {event}\n\n".encode())

    def may_ask(self) -> bool:
        given = self.headers.get("Authorization", "")
        self.server.keys.append(given)
        if self.server.key and given != f"Bearer {self.server.key}":
            self.send(401, {"error": {"message": "no valid key", "code": "invalid_api_key"}})
            return False
        return True

    def send(self, status: int, body: Any) -> None:
        self.send_text(status, json.dumps(body))

    def send_text(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def api_server() -> Iterator[ApiServer]:
    with ApiServer() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made
        finally:
            made.go_on.set()
            made.shutdown()
            thread.join()


def says(*texts: str, thinks: str = "") -> list[str]:
    """Return events of a chat completion."""
    deltas = [{"reasoning_content": thinks}] if thinks else []
    deltas += [{"content": text} for text in texts]
    return [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]


def ends(finish: str = "stop", **usage: int) -> list[str]:
    """Return the last events of a completion."""
    last = {"choices": [{"delta": {}, "finish_reason": finish}]}
    return [json.dumps(last), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
