"""Many concurrent connections to a router while its certificate is replaced."""

import random
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from systems.single_processes import SingleProcesses, files_of, replace_file, trusted

from pdserve.services.common.auth.access import TlsAccess
from pdserve.services.common.auth.certificates import Identity, Role, issue
from pdserve.services.common.process import GRPC_POLLER

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

AT_ONCE = 64
STORM_S = 15.0
CONNECT_S = 30.0
MAX_PAUSE_S = 0.1  # between two certificates
# Of gRPC: all processes except the router have "event engine".
POLLERS = {"event engine": "", "poller": GRPC_POLLER}


class Renewing:
    """Context manager whose thread replaces the router's certificate at random times."""

    def __init__(self, folder: Path) -> None:
        self.shown: list[bytes] = []  # PEM
        self._folder = folder
        self._authority = Identity(
            (folder / "ca.pem").read_bytes(), (folder / "ca-key.pem").read_bytes()
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Renewing":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        _, certificate, key = files_of(self._folder, Role.ROUTER)
        draw = random.Random(1)
        while not self._over.wait(draw.uniform(0, MAX_PAUSE_S)):
            own = issue(self._authority, Role.ROUTER)
            replace_file(Path(key), own.key)
            replace_file(Path(certificate), own.certificate)
            self.shown.append(own.certificate)


@pytest.mark.parametrize("experiments", POLLERS.values(), ids=POLLERS)
def test_a_storm_of_connections_while_a_certificate_changes(
    experiments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC loads new files on the thread of the connection that finds them; the connections of its
    other threads succeed meanwhile.
    """
    monkeypatch.setenv("GRPC_EXPERIMENTS", experiments)
    with SingleProcesses(tmp_path) as system:
        system.start(Role.ROUTER)
        system.wait_joined()
        address, process = system.address[Role.ROUTER], system.processes[Role.ROUTER]

        def connects(access: TlsAccess) -> bool:
            with access.open_blocking_channel(address, Role.ROUTER) as channel:
                try:
                    grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
                except grpc.FutureTimeoutError:
                    return False
            return True

        num_connected = num_failed = 0
        ends = time.monotonic() + STORM_S
        with ThreadPoolExecutor(AT_ONCE) as pool, Renewing(system.certificates) as renewing:
            access = trusted(system.certificates, Role.GATEWAY)
            while time.monotonic() < ends and process.poll() is None:
                connected = sum(pool.map(connects, [access] * AT_ONCE))
                num_connected += connected
                num_failed += AT_ONCE - connected
        assert process.poll() is None, (tmp_path / "router.log").read_text()
        assert not num_failed
        assert num_connected >= 2 * AT_ONCE
        assert len(renewing.shown) > STORM_S, "the certificate hardly changed"
        host, port = address.split(":")
        now_shown = ssl.get_server_certificate((host, int(port)))
        newest = renewing.shown[-1].decode()
        assert ssl.PEM_cert_to_DER_cert(now_shown) == ssl.PEM_cert_to_DER_cert(newest)
