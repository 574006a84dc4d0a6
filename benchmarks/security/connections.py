"""Many connect to a router at once, over and over, while its certificate is replaced.

`python benchmarks/security/connections.py` does it for a minute, and prints one JSON object. gRPC
takes new files on the thread of whichever connection finds them; connections on its other threads
must not notice.
"""

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from roles import access_of, files, make_certificates, start, trust
from rotation import put

from pdserve.services.host.auth.access import Access
from pdserve.services.host.auth.certificates import Identity, issue
from pdserve.services.host.auth.roles import Role

SECONDS = 60.0
AT_ONCE = 64
ROUNDS_OF_A_CERTIFICATE = 10
ADDRESS = "127.0.0.1:18457"
BEGUN_S, CONNECTED_S = 30.0, 20.0


def connects(access: Access, limit_s: float = CONNECTED_S) -> bool:
    """Whether a new connection to the router is made in time."""
    with access.open_blocking_channel(ADDRESS, Role.ROUTER) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=limit_s)
        except grpc.FutureTimeoutError:
            return False
    return True


def replace_certificate(folder: Path, authority: Identity) -> None:
    _, certificate, key = files(Role.ROUTER, folder)
    own = issue(authority, Role.ROUTER)
    put(key, own.key)
    put(certificate, own.certificate)


def storm(seconds: float = SECONDS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_certificates(folder)
        authority = Identity((folder / "ca.pem").read_bytes(), (folder / "ca-key.pem").read_bytes())
        words = ["--bind", ADDRESS, *trust(Role.ROUTER, folder)]
        router = start(stack, "router", *words)
        access = access_of(Role.GATEWAY, folder)
        connects(access, BEGUN_S)
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        rounds: list[int] = []  # connections that were made, of those at once
        replaced = 0
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and router.poll() is None:
            if rounds and len(rounds) % ROUNDS_OF_A_CERTIFICATE == 0:
                replace_certificate(folder, authority)
                replaced += 1
            rounds.append(sum(pool.map(connects, [access] * AT_ONCE)))
        return {
            "ok": router.poll() is None and replaced > 0 and all(n == AT_ONCE for n in rounds),
            "connections": sum(rounds),
            "failed": AT_ONCE * len(rounds) - sum(rounds),
            "certificates_replaced": replaced,
            "router_ended_with": router.poll(),
        }


if __name__ == "__main__":
    found = storm()
    print(json.dumps(found))
    sys.exit(not found["ok"])
