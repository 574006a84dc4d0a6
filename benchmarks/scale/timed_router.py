"""A real router process that records the time to place each request.

`timed_router.py FILE WORDS...`: WORDS are those of `pdserve router`. At its end FILE has a JSON
object: `placed`, an array per request with its id, the time when placing began (time.monotonic),
seconds by the clock and seconds of the thread's processor time, both until the Admit is in the
worker's outbox; `looks`, arrays of a time, of the loop's delay at it (a message waits that long)
and of the number of worker reports read by then, and whether it heard too few of its workers.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from pdserve.services.common.process import use_grpc_poller

use_grpc_poller()  # as `pdserve router` does, before gRPC is imported

from pdserve.cli.main import main as pdserve  # noqa: E402
from pdserve.services.common.rpc import RequestProgress  # noqa: E402
from pdserve.services.router.core import RouterCore  # noqa: E402
from pdserve.services.router.request import Client  # noqa: E402

LOOK_S = 0.0973  # between two checks of the loop's delay; more would load an idle router

begin, submit, report = RouterCore.__init__, RouterCore.submit, RouterCore.report
placed: list[tuple[str, float, float, float]] = []
looks: list[tuple[float, float, int, bool]] = []
num_reports = 0


def timed_submit(router: RouterCore, progress: RequestProgress, client: Client) -> None:
    began, used = time.monotonic(), time.thread_time()
    submit(router, progress, client)
    used, ended = time.thread_time() - used, time.monotonic()
    placed.append((progress.start.request, began, ended - began, used))


def counted_report(router: RouterCore, worker: Any, said: Any, lease: int) -> bool:
    global num_reports
    num_reports += 1
    return report(router, worker, said, lease)


def watched_core(router: RouterCore, *args: Any, **kwargs: Any) -> None:
    begin(router, *args, **kwargs)
    loop = asyncio.get_running_loop()

    def look(due: float) -> None:
        now = loop.time()
        looks.append((time.monotonic(), now - due, num_reports, router.fleet.isolated))
        loop.call_at(now + LOOK_S, look, now + LOOK_S)

    look(loop.time())


def main() -> int:
    RouterCore.__init__ = watched_core  # type: ignore[method-assign]
    RouterCore.report = counted_report  # type: ignore[method-assign]
    RouterCore.submit = timed_submit  # type: ignore[method-assign]
    code = pdserve(["router", *sys.argv[2:]])
    noted = {"placed": placed, "looks": looks}
    Path(sys.argv[1]).write_text(json.dumps(noted))
    return code


if __name__ == "__main__":
    sys.exit(main())
