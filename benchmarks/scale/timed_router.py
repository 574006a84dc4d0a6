"""The router's own process, which notes what it takes to place each request.

`timed_router.py FILE WORDS...`: WORDS are those of `pdserve router`. At its end FILE has one JSON
array a request: its id, when placing began (time.monotonic), seconds by the clock, seconds of the
thread's processor time. Both end when the Admit is in the worker's outbox.
"""

import json
import sys
import time
from pathlib import Path

from pdserve.services.cli.main import main as pdserve
from pdserve.services.host.rpc.request_progress import RequestProgress
from pdserve.services.router.core import RouterCore
from pdserve.services.router.requests.effects import Client

submit = RouterCore.submit
samples: list[tuple[str, float, float, float]] = []


def timed_submit(core: RouterCore, progress: RequestProgress, client: Client) -> None:
    began, used = time.monotonic(), time.thread_time()
    submit(core, progress, client)
    used, ended = time.thread_time() - used, time.monotonic()
    samples.append((progress.start.request, began, ended - began, used))


def main() -> int:
    RouterCore.submit = timed_submit  # type: ignore[method-assign]
    code = pdserve(["router", *sys.argv[2:]])
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    return code


if __name__ == "__main__":
    sys.exit(main())
