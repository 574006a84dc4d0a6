"""The gateway as a separate process, for tests that kill it."""

import json
import subprocess
import sys
from types import TracebackType
from typing import Any

from pdserve.gateway.batches.batches import LEASE_S
from systems.cluster_secret import SECRET

PROGRAM = """
import json, sys
from pdserve.gateway.batches import batches
from pdserve.gateway.main import run
from pdserve.gateway.settings import GatewaySettings
def report(event, figures):
    print(json.dumps([event, figures]), flush=True)
batches.LEASE_S = float(sys.argv[2])
sys.exit(run(GatewaySettings(**json.loads(sys.argv[1])), report))
"""


class GatewayProcess:
    """Context manager: `with` returns when it listens; killed at the end if it lives. `lease_s`:
    time after which it takes over a batch of a gateway that shows no activity.
    """

    def __init__(self, router: str, lease_s: float = LEASE_S, **settings: Any) -> None:
        self._lease_s = lease_s
        self._settings = {"port": 0, "routers": [router], "cluster_secret": [SECRET], **settings}

    def __enter__(self) -> "GatewayProcess":
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(self._settings), str(self._lease_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        name, figures = json.loads(self.process.stdout.readline())
        assert name == "listening"
        self.url: str = figures["url"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
