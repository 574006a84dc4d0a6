"""Many concurrent and repeated connections to a router, while its certificate is replaced.

`python benchmarks/security/connections.py` runs half a minute with each of gRPC's pollers, and
prints one JSON object. gRPC loads new files on the thread of whichever connection finds them;
connections on its other threads must not be affected. A router that found new files at each
connection crashed after 485 and 1,870 connections, and one that took 1,051 new certificates without
a pause (auth/tls.py) at the last of them.
"""

import json
import random
import socket
import ssl
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from roles import access_of, files, make_certificates, start, trust
from rotation import put

from pdserve.services.host.auth.access import Access
from pdserve.services.host.auth.certificates import Identity, issue
from pdserve.services.host.auth.roles import Role
from pdserve.services.host.process import GRPC_POLLER

SECONDS = 30.0
AT_ONCE = 64
MOST_BETWEEN_S = 0.1  # two certificates
HOST, PORT = "127.0.0.1", 18457
ADDRESS = f"{HOST}:{PORT}"
BEGUN_S, CONNECTED_S = 30.0, 20.0
# of all roles except the router; of the router
POLLERS = {"event engine": "", "poller": GRPC_POLLER}


def connects(access: Access, limit_s: float = CONNECTED_S) -> bool:
    """Whether a new connection to the router succeeds in time."""
    with access.open_blocking_channel(ADDRESS, Role.ROUTER) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=limit_s)
        except grpc.FutureTimeoutError:
            return False
    return True


def shown(folder: Path) -> int | None:
    """The serial number of the router's certificate; None if it does not answer."""
    authority, certificate, key = files(Role.GATEWAY, folder)
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False  # the certificate has the name of its role
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((HOST, PORT), CONNECTED_S) as plain,
            context.wrap_socket(plain) as sealed,
        ):
            told = sealed.getpeercert(binary_form=True)
    except OSError:  # includes SSLError
        return None
    return x509.load_der_x509_certificate(told).serial_number if told else None


class Replacing:
    """A thread that replaces the router's certificate at random times."""

    def __init__(self, folder: Path) -> None:
        self.serials: list[int] = []
        self._folder = folder
        own = (folder / "ca.pem").read_bytes(), (folder / "ca-key.pem").read_bytes()
        self._authority = Identity(*own)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Replacing":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        _, certificate, key = files(Role.ROUTER, self._folder)
        while not self._stop.wait(random.uniform(0, MOST_BETWEEN_S)):
            own = issue(self._authority, Role.ROUTER)
            put(key, own.key)
            put(certificate, own.certificate)
            self.serials.append(x509.load_pem_x509_certificate(own.certificate).serial_number)


def storm(experiments: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Run the connections; `experiments`: of gRPC in the router."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_certificates(folder)
        words = ["--bind", ADDRESS, *trust(Role.ROUTER, folder)]
        router = start(stack, "router", *words, env={"GRPC_EXPERIMENTS": experiments})
        access = access_of(Role.GATEWAY, folder)
        connects(access, BEGUN_S)
        made = failed = 0
        ends = time.monotonic() + seconds
        with ThreadPoolExecutor(AT_ONCE) as pool, Replacing(folder) as replacing:
            while time.monotonic() < ends and router.poll() is None:
                connected = sum(pool.map(connects, [access] * AT_ONCE))
                made, failed = made + connected, failed + AT_ONCE - connected
        newest = [shown(folder)] == replacing.serials[-1:]
        return {
            "ok": newest and not failed and router.poll() is None,
            "connections": made,
            "failed": failed,
            "certificates": len(replacing.serials),
            "shows_the_newest": newest,
            "router_ended_with": router.poll(),
        }


def storms() -> dict[str, Any]:
    found = {name: storm(experiments) for name, experiments in POLLERS.items()}
    return {"ok": all(one["ok"] for one in found.values()), **found}


if __name__ == "__main__":
    told = storms()
    print(json.dumps(told))
    sys.exit(not told["ok"])
