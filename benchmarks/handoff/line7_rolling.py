"""Line 7: every container is restarted in turn under load through docker compose, and no request
fails.

With compose.ha.yml (two of everything behind HAProxy) the client is a raw one that never retries;
with docker-compose.yml alone it is the openai client with its retries, and only the single gateway
may break streams: its open ones. A restart is `docker stop` (SIGTERM, SIGKILL after
stop_grace_period), `docker start`, and the wait until the container is healthy.

The line starts a separate engine, with images built from the checkout; HAProxy is Debian's, under
the name of the image that compose.ha.yml runs. `--images FOLDER` uses an engine that has them
already.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from steady_load import Load, OpenAiClient, RawClient, asks
from systems.compose_project import KEY, ROLES, Project
from systems.docker_engine import DockerEngine, docker_engine, missing
from systems.eventually import eventually

CLIENTS = 6
GRACE_S = 45.0  # stop_grace_period: past it the container is killed
MAX_RETRIES = 30  # for a client that waits for the single gateway: it retries once per second
STREAMS_S = 60.0


@contextmanager
def engine_with_images(folder: Path | None) -> Iterator[DockerEngine]:
    if folder is not None:
        yield DockerEngine(folder)
        return
    with tempfile.TemporaryDirectory() as made, docker_engine(Path(made) / "engine") as engine:
        engine.make_base_images()
        engine.make_proxy_image()
        yield engine


def get(project: Project, path: str) -> httpx.Response:
    auth = {"authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{project.url}{path}", headers=auth, timeout=60)
    return answer.raise_for_status()


def prefills(project: Project, where: str) -> float:
    name = "pdserve_prefill_requests_total"
    text = get(project, "/metrics").text
    found = re.findall(rf'^{name}{{.*where="{where}".*}} (\S+)', text, re.MULTILINE)
    return sum(float(value) for value in found)


def model_name(project: Project) -> str:
    return str(get(project, "/v1/models").json()["data"][0]["id"])


async def restart(project: Project, load: Load, role: str, container: str) -> dict[str, Any]:
    await eventually(lambda: load.running, "streams under way", STREAMS_S)
    load.where = f"{role} {container[:12]}"
    before = load.completed
    running = load.running
    began = time.monotonic()
    code = await asyncio.to_thread(project.stop, container)
    stopped_s = time.monotonic() - began
    await asyncio.to_thread(project.start, container)
    return {
        "role": role,
        "streams": running,
        "exit_code": code,
        "stopped_s": round(stopped_s, 1),
        "healthy_s": round(time.monotonic() - began, 1),
        "completed_meanwhile": load.completed - before,
    }


async def roll(project: Project, client: RawClient | OpenAiClient) -> dict[str, Any]:
    """Restart every container once, one after the other, under load."""
    load = Load(client.chunks, await asyncio.to_thread(model_name, project))
    await load.learn(asks())
    remote = await asyncio.to_thread(prefills, project, "remote")
    streaming = asyncio.create_task(load.run(CLIENTS))
    restarts = []
    for role in ROLES:
        for container in await asyncio.to_thread(project.containers, role):
            restarts.append(await restart(project, load, role, container))
            print(json.dumps(restarts[-1]), file=sys.stderr, flush=True)
    load.stop()
    await streaming
    await client.close()
    gateways_own = [text for text in load.broken if text.startswith("gateway ")]
    figures = {
        "completed": load.completed,
        "failed": load.failed,
        "broken": [text for text in load.broken if text not in gateways_own],
        "broken_with_their_gateway": gateways_own,
        "unequal": load.unequal,
        "most_retries": client.most_retries,
        "remote_prefills_in_calm": remote,
        "restarts": restarts,
    }
    figures["ok"] = (
        not load.failed
        and not figures["broken"]
        and not load.unequal
        and remote > 0
        and all(r["streams"] and not r["exit_code"] for r in restarts)
        and all(r["stopped_s"] < GRACE_S and r["completed_meanwhile"] for r in restarts)
    )
    return figures


def part(engine: DockerEngine, files: tuple[str, ...], build: bool) -> dict[str, Any]:
    """One set of compose files; images are present or built now."""
    with tempfile.TemporaryDirectory() as folder:
        project = Project(engine, Path(folder), files, "pdserve-rolling")
        if build:
            project.build()
        try:
            project.up()
            twice = "compose.ha.yml" in files
            client = (
                RawClient(project.url, KEY)
                if twice
                else OpenAiClient(project.url, KEY, MAX_RETRIES)
            )
            figures = asyncio.run(roll(project, client))
            figures["ok"] &= len(figures["restarts"]) == (8 if twice else 5)
            figures["ok"] &= not (twice and figures["broken_with_their_gateway"])
        finally:
            log = project.compose("logs", "--no-color", "--timestamps")
            print(log, file=sys.stderr)
            project.down()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, help="folder of a running engine with the images")
    parser.add_argument("--only", choices=("ha", "default"), help="one of the two parts")
    args = parser.parse_args()
    if reason := missing():
        print(json.dumps({"ok": False, "error": reason}))
        return 1
    figures: dict[str, Any] = {"clients": CLIENTS, "openai_max_retries": MAX_RETRIES}
    parts = {
        "ha": ("docker-compose.yml", "compose.ha.yml"),
        "default": ("docker-compose.yml",),
    }
    chosen = [args.only] if args.only else list(parts)
    with engine_with_images(args.images) as engine:
        build = args.images is None
        for name in chosen:
            figures[name] = part(engine, parts[name], build)
            build = False
    figures = {"ok": all(figures[name]["ok"] for name in chosen), **figures}
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
