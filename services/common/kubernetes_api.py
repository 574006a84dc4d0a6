"""A client of the Kubernetes API server for a process in a pod.

The certificate authority and the service account's token are read for each request, since the
kubelet replaces both files. docs/discovery.md explains why this is not a client library.
"""

import json
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedIOBase
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # token, ca.crt, namespace
CONNECT_S = 5.0
ANSWER_S = 30.0  # between two bytes of the response to `send`
MAX_BYTES = 64 << 20  # of a response; etcd has no object of more than 2 MiB
# Detects within 25 s that the machine of a peer has failed.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class ApiServerError(Exception):
    """Raised when the Kubernetes API server answers a request with an error status."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.retry_after_s = retry_after_s


class ApiServer:
    """A client of the Kubernetes API server, which authenticates with the pod's service account."""

    def __init__(self, environ: Mapping[str, str] = os.environ, account: str = "") -> None:
        """`account` is the folder of the service account's files (token, ca.crt, namespace). Raises
        ValueError if this process does not run in a pod."""
        host, port = (environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port.isdecimal():
            raise ValueError(
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: this process "
                "does not run in a pod"
            )
        self._host, self._port = host, int(port)
        self._account = Path(account or SERVICE_ACCOUNT)

    def namespace(self) -> str:
        """Return the namespace of this process's pod. Raises OSError if its file cannot be read."""
        return (self._account / "namespace").read_text().strip()

    @contextmanager
    def get(
        self,
        path: str,
        query: Mapping[str, str],
        silent_s: float,
        on_connect: Callable[[socket.socket], None],
    ) -> Iterator[BufferedIOBase]:
        """Send a GET request and yield its response, of status 200. A read of the response times
        out after `silent_s` without data. `on_connect` receives the socket; shutting it down from
        another thread ends the reads. Raises ApiServerError if the response has another status,
        OSError if the connection fails, also during reads."""
        target = f"{path}?{urlencode(query)}"
        with self._exchange("GET", target, None, silent_s, on_connect) as response:
            yield response

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, with `body` as JSON if there is one, and return the object in its
        response. Raises ApiServerError if the request is refused, OSError if the connection fails,
        ValueError if the response is not JSON."""
        content = None if body is None else json.dumps(body)
        with self._exchange(method, path, content, ANSWER_S, lambda sock: None) as response:
            return read_json(response)

    @contextmanager
    def _exchange(
        self,
        method: str,
        target: str,
        body: str | None,
        silent_s: float,
        on_connect: Callable[[socket.socket], None],
    ) -> Iterator[BufferedIOBase]:
        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        # Authorities of many clusters lack fields that Python 3.13 requires by default.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        token = (self._account / "token").read_text().strip()
        connection = HTTPSConnection(self._host, self._port, timeout=CONNECT_S, context=context)
        try:
            connection.connect()
            _keep_alive(connection.sock)
            on_connect(connection.sock)
            headers = {
                "Authorization": f"Bearer {token}",
                "Accept": "application/json",
                "Content-Type": "application/json",
            }
            connection.request(method, target, body, headers)
            connection.sock.settimeout(silent_s)
            with connection.getresponse() as response:  # the response may own the socket by then
                if response.status not in (200, 201):
                    raise _error(response)
                yield response
        except HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()


def read_json(response: BufferedIOBase) -> Any:
    """Read the whole response as JSON. Raises ValueError if it is not JSON."""
    return json.loads(response.read(MAX_BYTES))


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # Linux has all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _error(response: HTTPResponse) -> ApiServerError:
    """Return the ApiServerError of a refused request, with the message of the Status object in the
    response if there is one."""
    message = response.reason
    with suppress(OSError, HTTPException, ValueError, KeyError, TypeError):  # a proxy's error page
        message = str(json.loads(response.read(1 << 16))["message"])
    after = response.headers.get("Retry-After", "")
    return ApiServerError(response.status, message, float(after) if after.isdecimal() else 0.0)
