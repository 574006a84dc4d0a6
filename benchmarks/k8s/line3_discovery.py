"""Line 3: routers are discovered while the API server fails, and no request is lost that had a live
worker.

view: CHANGES random changes of pods and EndpointSlices at a fake API server, with faults of every
kind in a share of its responses, events that are compacted, restarts and rotated tokens. After each
ROUND it is quiet, and two views (ready ones, all) must equal the truth within QUIET_S. Two times
are shorter here, since faults are that dense: a silent watch is abandoned after SILENT_WATCH_S (50
s in production), and the API server is retried after at most BACKOFF_S (10 s). requests: real
routers, gateways' clients and workers that find each other through the same API server, while
routers are added, rolled, crash, are not ready for a while, and the API server is unavailable.
Every answer must be complete, token by token.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from fakes.endpoints import FakeEndpoints
from fakes.kubernetes import FakeKubernetes
from systems.discovered import TARGET, DiscoveredSystem
from systems.eventually import wait_until

from pdserve.services.host.discovery import api_server, kubernetes
from pdserve.services.host.discovery.discovery import Discovery

CHANGES, ROUND, QUIET_S = 1000, 10, 2.0
SILENT_WATCH_S, BACKOFF_S = 1.2, 1.0
SYSTEM_CHANGES, WIDTH = 150, 16
SHARE = 0.3  # share of faulty responses of the API server


def fake(folder: str, seed: int) -> FakeKubernetes:
    """A fake API server, which this process uses as its cluster's."""
    api = FakeKubernetes(Path(folder), seed)
    api.start()
    os.environ.update(api.environ)
    api_server.SERVICE_ACCOUNT = folder
    return api


def break_more(api: FakeKubernetes, pods: FakeEndpoints, rng: Random) -> None:
    """Occasionally make more than one response wrong."""
    match rng.randrange(40):
        case 0:
            api.compact()
        case 1:
            api.stop()
            pods.change()
            time.sleep(rng.random() * 0.3)
            api.start()
        case 2:
            api.rotate_token()
            api.break_watches()
        case 3:
            api.answers.append((rng.choice((401, 403, 410, 429, 500)), {}))
            api.break_watches()


def view(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        api, rng = fake(folder, seed), Random(seed)
        pods = FakeEndpoints(api, rng)
        views = {
            r: Discovery("--routers", [TARGET], lambda: None, ready_only=r) for r in (True, False)
        }
        late: list[float] = []
        began = time.process_time()

        def true() -> bool:
            return all(views[r].look() == {TARGET: pods.addresses(r)} for r in views)

        for _ in range(CHANGES // ROUND):
            api.faults = SHARE
            for _ in range(ROUND):
                break_more(api, pods, rng)
                pods.change()
                time.sleep(rng.random() * 0.02)
            api.faults = 0.0
            api.answers.clear()
            quiet = time.monotonic()
            wait_until(true, "the view is not the truth")
            late.append(time.monotonic() - quiet)
        used_s = time.process_time() - began
        for one in views.values():
            one.close()
        api.stop()
    late.sort()
    return {
        "ok": late[-1] <= QUIET_S,
        "changes": CHANGES,
        "late_s": {"p50": round(late[len(late) // 2], 3), "max": round(late[-1], 3)},
        "faults": dict(api.counts),
        "requests": len(api.requests),
        "cpu_s": round(used_s, 1),  # including the fake
    }


async def requests(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        api = fake(folder, seed)
        system = DiscoveredSystem(api, seed, num_workers=3, num_gateways=3)
        await system.start(3)
        began = time.process_time()
        system.begin_asking(WIDTH)
        for _ in range(SYSTEM_CHANGES):
            api.faults = SHARE
            await system.change()
            api.faults = 0.0
        await system.end_asking()
        used_s = time.process_time() - began
        await system.close()
        await asyncio.to_thread(api.stop)
    return {
        "ok": not system.wrong and system.num_right > 1000,
        "right": system.num_right,
        "wrong": system.wrong[:5],
        "changes": dict(system.counts),
        "cpu_s": round(used_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=20)
    seed = parser.parse_args().seed
    kubernetes.WATCH_S, kubernetes.SILENT_S = 1, SILENT_WATCH_S - 1
    kubernetes.MAX_BACKOFF_S = BACKOFF_S
    parts = {"view": view(seed), "requests": asyncio.run(requests(seed))}
    print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))
    sys.exit(not all(part["ok"] for part in parts.values()))


if __name__ == "__main__":
    main()
