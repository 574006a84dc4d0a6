"""A Kubernetes API server that knows only EndpointSlices and Secrets, over TLS, with faults on
demand.

It lists and watches as the real one does: resource versions, bookmarks, time limits, 410 for
compacted versions. Faults come from a seeded source, a share of all answers while `faults` is
above 0.
"""

import datetime
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from random import Random
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdserve.services.common import kubernetes_api

NAMESPACE = "llm"
COLLECTION = re.compile(r"/apis/discovery\.k8s\.io/v1/namespaces/([^/]+)/endpointslices")
SECRETS = re.compile(r"/api/v1/namespaces/([^/]+)/secrets(?:/([^/]+))?")
SERVICE_LABEL = "kubernetes.io/service-name"
# Faults of an answer, and of a moment at which a watch has an event to send.
ANSWER_FAULTS = ("500", "503", "reset", "half")
EVENT_FAULTS = ("cut", "reset", "early", "gone", "error", "silent", "repeat", "reorder", "late")
BROKEN = ("cut", "reset", "early", "gone", "error", "silent")  # they end a watch, or its use
LATE_S = 0.03
Object = dict[str, Any]


def endpoint_slice(
    name: str,
    service: str,
    endpoints: list[Object],
    ports: list[Object] | None = None,
    family: str = "IPv4",
    namespace: str = NAMESPACE,
) -> Object:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {SERVICE_LABEL: service}},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": "grpc", "port": 50050, "protocol": "TCP"}] if ports is None else ports,
    }


def status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
            "message": message}  # fmt: skip


class FakeKubernetes:
    """Serves between `start` and `stop`; `folder` gets the files of a service account."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.rng = Random(seed)
        self.faults = 0.0
        self.requests: list[dict[str, str]] = []  # their queries
        self.answers: deque[tuple[int, dict[str, str]]] = deque()  # status and headers, once each
        self.counts: Counter[str] = Counter()  # faults
        self.port = 0
        self.changed = threading.Condition()  # guards the attributes below
        self.version = 1
        self.life = 0  # `stop` ends it
        self.objects: dict[tuple[str, str], Object] = {}  # by namespace and name
        self.history: list[tuple[int, str, Object]] = []
        self.secrets: dict[str, Object] = {}  # by name
        self.compacted = 1  # events up to this version are not available
        certificate, key = _self_signed()
        (folder / "ca.crt").write_bytes(certificate)
        (folder / "namespace").write_text(NAMESPACE)
        pem = folder / "server.pem"
        pem.write_bytes(key + certificate)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(pem)
        self.rotate_token()

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment of a pod."""
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.port),
        }

    def start(self) -> None:
        """Start, or restart on the same port."""
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.fake = self
        self.port = self._server.server_address[1]
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections, and break those that are open."""
        with self.changed:
            self.life += 1
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._server.break_connections()
        self._thread.join()

    def break_watches(self) -> None:
        """Break the open watches."""
        self._server.break_connections()

    def rotate_token(self, written: bool = True) -> None:
        """Refuse the previous token from now on."""
        self.token = f"token-{time.monotonic_ns()}"
        if written:
            self.write_token()

    def write_token(self) -> None:
        (self.folder / "token").write_text(self.token + "\n")

    def put(self, found: Object) -> None:
        """Store a slice that is new or has changed."""
        key = found["metadata"]["namespace"], found["metadata"]["name"]
        with self.changed:
            self._happen("MODIFIED" if key in self.objects else "ADDED", found)
            self.objects[key] = self.history[-1][2]

    def delete(self, name: str, namespace: str = NAMESPACE) -> None:
        with self.changed:
            self._happen("DELETED", self.objects.pop((namespace, name)))

    def _happen(self, kind: str, found: Object) -> None:
        self.version += 1
        made = json.loads(json.dumps(found))
        made["metadata"]["resourceVersion"] = str(self.version)
        made |= {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
        self.history.append((self.version, kind, made))
        self.changed.notify_all()

    def compact(self) -> None:
        """Forget past events; watches from before get 410."""
        with self.changed:
            self.history.clear()
            self.compacted = self.version

    def draw(self, faults: tuple[str, ...]) -> str:
        """Draw a fault, or none."""
        with self.changed:
            if self.rng.random() >= self.faults:
                return ""
            fault = self.rng.choice(faults)
            self.counts[fault] += 1
            return fault


@contextmanager
def in_pod(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    """Run a server that this process finds as in a pod."""
    server = FakeKubernetes(folder)
    server.start()
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", str(folder))
    try:
        yield server
    finally:
        server.stop()


def matches(found: Object, namespace: str, selector: str) -> bool:
    metadata = found["metadata"]
    key, _, value = selector.partition("=")
    return metadata["namespace"] == namespace and metadata["labels"].get(key) == value


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64
    fake: FakeKubernetes

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def break_connections(self) -> None:
        for one in list(self.connections):
            with suppress(OSError):
                socket.socket.shutdown(one, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a peer that has gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        self.request = self.server.fake.tls.wrap_socket(self.request, server_side=True)
        self.server.connections.add(self.request)
        super().setup()

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        self.server.connections.discard(self.request)
        self.request.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        fake = self.server.fake
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        fake.requests.append(query)
        self.close_connection = True
        found = COLLECTION.fullmatch(parts.path)
        if fake.answers:
            code, headers = fake.answers.popleft()
            self._say(code, status(code, f"scripted status {code}"), headers)
        elif self.headers["Authorization"] != f"Bearer {fake.token}":
            self._say(401, status(401, "Unauthorized"))
        elif secret := SECRETS.fullmatch(parts.path):
            self._secret(secret[2])
        elif not found:
            self._say(404, status(404, "the server could not find the requested resource"))
        elif "watch" in query:
            self._watch(found[1], query)
        else:
            self._list(found[1], query["labelSelector"])

    do_POST = do_PUT = do_GET

    def _secret(self, name: str | None) -> None:
        """Answer a request for the Secret with this name; None: a request to create one."""
        secrets = self.server.fake.secrets
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.command == "POST":
            name = str(body["metadata"]["name"])
            if name in secrets:
                self._say(409, status(409, f'secrets "{name}" already exists'))
                return
        elif name not in secrets:
            self._say(404, status(404, f'secrets "{name}" not found'))
            return
        assert name is not None
        if body is not None:
            secrets[name] = body
        self._say(201 if self.command == "POST" else 200, secrets[name])

    def _say(self, code: int, answer: Object, headers: dict[str, str] | None = None) -> None:
        fault = self.server.fake.draw(ANSWER_FAULTS) if code == 200 else ""
        if fault == "reset":
            return
        if fault in ("500", "503"):
            code, answer = int(fault), status(int(fault), "broken")
        body = json.dumps(answer).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "half" else body)

    def _list(self, namespace: str, selector: str) -> None:
        fake = self.server.fake
        with fake.changed:
            items = [x for x in fake.objects.values() if matches(x, namespace, selector)]
            metadata = {"resourceVersion": str(fake.version)}
            answer = {"kind": "EndpointSliceList", "metadata": metadata, "items": items}
        self._say(200, answer)

    def _watch(self, namespace: str, query: dict[str, str]) -> None:
        fake = self.server.fake
        since, life = int(query["resourceVersion"]), fake.life
        until = time.monotonic() + int(query["timeoutSeconds"])
        if since < fake.compacted and fake.rng.random() < 0.5:
            self._say(410, status(410, "too old resource version"))
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        sent: list[tuple[str, Object]] = []
        while True:
            with fake.changed:
                if since < fake.compacted:
                    events: list[tuple[str, Object]] = []
                    fault = "gone"
                else:
                    fault = ""
                    news = [x for x in fake.history if x[0] > since]
                    mine = [x for x in news if matches(x[2], namespace, query["labelSelector"])]
                    events = [(kind, found) for _, kind, found in mine]
                    since = max([since, *(version for version, _, _ in news)])
                    left = until - time.monotonic()
                    if not events:
                        if left <= 0:
                            break
                        fake.changed.wait(left)
                if fake.life != life:
                    return
            fault = fault or (fake.draw(EVENT_FAULTS) if events else "")
            if not self._events(fault, events, sent):
                return
            sent += events
        self._event("BOOKMARK", {"metadata": {"resourceVersion": str(since)}})
        self.wfile.write(b"0\r\n\r\n")

    def _events(
        self, fault: str, events: list[tuple[str, Object]], sent: list[tuple[str, Object]]
    ) -> bool:
        """Send events, with a fault if one is named; False: the watch is over."""
        if fault == "late":
            time.sleep(LATE_S)
        elif fault == "repeat":
            events = [*events, *sent[-3:], *events[-1:]]
        elif fault == "reorder":
            events = events[::-1]
        elif fault == "gone":
            self._event("ERROR", status(410, "too old resource version"))
        elif fault == "error":
            self._event("ERROR", status(500, "etcd has no leader"))
        elif fault == "cut":
            line = _line(*events[0])
            self.wfile.write(b"%x\r\n%s" % (len(line), line[: len(line) // 2]))
        elif fault == "silent":
            with suppress(OSError):
                while self.connection.recv(1 << 10):  # until the peer gives up
                    pass
        if fault in ("gone", "error", "early"):
            self.wfile.write(b"0\r\n\r\n")
        if fault in BROKEN:
            return False
        for kind, found in events:
            self._event(kind, found)
        return True

    def _event(self, kind: str, found: Object) -> None:
        line = _line(kind, found)
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))


def _line(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def _self_signed() -> tuple[bytes, bytes]:
    """Return a certificate of 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    own = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(own, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
