"""`docker compose up` on a real engine: images are built, containers answer, all ends in order."""

import re
import time
from typing import Any

import pytest
from compose_project import ROLES, Project
from docker_engine import DockerEngine
from eventually import wait_until

from pdserve.services.cli.http_client import ApiClient, ApiError

PROMPT = "The quick brown fox jumps over the lazy dog near the old river bank. " * 45

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


def chat(client: ApiClient, text: str) -> dict[str, Any]:
    model = client.get_json("/v1/models")["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    answer: dict[str, Any] = client.post_json(
        "/v1/chat/completions", {**body, "max_tokens": 12, "temperature": 0}
    )
    return answer


def test_a_chat_request_is_answered(client: ApiClient) -> None:
    answer = chat(client, "Name the capital of France.")
    (choice,) = answer["choices"]
    assert choice["message"]["content"].strip()
    assert answer["usage"]["completion_tokens"] > 3


def test_a_long_prompt_crosses_containers_in_shared_memory(
    project: Project, client: ApiClient
) -> None:
    answer = chat(client, PROMPT + "Which animal jumps over the dog?")
    assert answer["usage"]["prompt_tokens"] > 600

    def reported() -> tuple[str, list[float]] | None:
        """Once both sides' load reports have come."""
        metrics = client.get("/metrics").decode()
        found = re.findall(r'pdserve_transfer_bytes_total\{transport="shm".*\} (\S+)', metrics)
        sent = [float(value) for value in found if float(value) > 1e6]
        return (metrics, sent) if len(sent) >= 2 else None

    metrics, sent = wait_until(reported, "bytes by shm")
    assert len(set(sent)) == 1, sent  # sent by prefill, verified by decode
    assert 'pdserve_prefill_requests_total{where="remote"} 1.0' in metrics


def test_the_key_is_needed(project: Project) -> None:
    with pytest.raises(ApiError) as caught:
        ApiClient(project.url).get("/v1/models")
    assert caught.value.status == 401


def test_two_decode_workers_are_up_and_healthy(project: Project) -> None:
    lines = project.compose("ps", "--format", "{{.Service}} {{.Health}}").split("\n")
    assert sorted(line for line in lines if line) == sorted(
        f"{role} healthy" for role in (*ROLES, "decode")
    )


@pytest.mark.usefixtures("project")
def test_no_image_has_torch_and_nobody_is_root(engine: DockerEngine) -> None:
    code = "import importlib.util, os; print(os.getuid(), bool(importlib.util.find_spec('torch')))"
    outputs = {}
    for image in ("pdserve-control", "pdserve-worker"):
        outputs[image] = engine.run(
            "run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", code
        ).split()
    assert outputs == {
        "pdserve-control": ["10001", "False"],
        "pdserve-worker": ["10001", "False"],
    }


def test_a_killed_worker_is_replaced_and_a_stop_is_clean(
    project: Project, client: ApiClient
) -> None:
    project.compose("kill", "--signal", "SIGKILL", "prefill")
    assert chat(client, PROMPT + "Which animal is lazy?")["choices"]
    started = time.monotonic()
    project.compose("stop")
    assert time.monotonic() - started < 30
    states = project.compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}").split("\n")
    codes = {line for line in states if line and not line.startswith("prefill")}
    assert codes == {"gateway 0", "router 0", "decode 0"}
