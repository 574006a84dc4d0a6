"""Every container is restarted in turn under load, and no request fails.

With compose.ha.yml (two of everything behind HAProxy) the client never retries; with
docker-compose.yml alone it is the openai client with its retries, and only the single gateway may
break streams: its open ones. A restart is `docker stop` (SIGTERM, SIGKILL after stop_grace_period),
`docker start`, and the wait until the container is healthy. HAProxy is Debian's, under the name of
the image that compose.ha.yml runs.
"""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from systems.compose_project import KEY, ROLES, Project
from systems.docker_engine import DockerEngine
from systems.eventually import eventually
from systems.steady_load import Load, OpenAiClient, RawClient, asks

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

CLIENTS = 6
GRACE_S = 45.0  # stop_grace_period: past it the container is killed
MAX_RETRIES = 30  # for a client that waits for the single gateway: it retries once per second
STREAMS_S = 60.0


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


async def roll(
    project: Project, client: RawClient | OpenAiClient
) -> tuple[list[dict[str, Any]], list[str]]:
    """Restart every container once, one after the other, under load. Return the restarts and the
    broken streams."""
    load = Load(client.chunks, await asyncio.to_thread(model_name, project))
    await load.learn(asks())
    remote = await asyncio.to_thread(prefills, project, "remote")
    streaming = asyncio.create_task(load.run(CLIENTS))
    restarts = []
    for role in ROLES:
        for container in await asyncio.to_thread(project.containers, role):
            restarts.append(await restart(project, load, role, container))
    load.stop()
    await streaming
    await client.close()
    assert remote > 0
    assert not load.failed
    assert not load.unequal
    return restarts, load.broken


@pytest.mark.parametrize(
    ("files", "num_containers"),
    [(("docker-compose.yml", "compose.ha.yml"), 8), (("docker-compose.yml",), 5)],
    ids=["two of each", "one gateway"],
)
def test_restarted_containers_fail_no_request(
    built: DockerEngine, tmp_path: Path, files: tuple[str, ...], num_containers: int
) -> None:
    built.make_proxy_image()
    twice = len(files) == 2
    project = Project(built, tmp_path, files, "pdserve-rolling")
    try:
        project.up()
        client = (
            RawClient(project.url, KEY) if twice else OpenAiClient(project.url, KEY, MAX_RETRIES)
        )
        restarts, broken = asyncio.run(roll(project, client))
    finally:
        print(project.compose("logs", "--no-color", "--timestamps"))
        project.down()
    assert len(restarts) == num_containers
    for one in restarts:
        assert one["streams"] > 0, one
        assert one["exit_code"] == 0, one
        assert one["stopped_s"] < GRACE_S, one
        assert one["completed_meanwhile"] > 0, one
    # A broken stream is recorded with the role and container that was restarted at that time.
    assert not [text for text in broken if twice or not text.startswith("gateway ")]
