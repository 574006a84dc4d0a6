"""`docker compose up` on a real engine: images build, containers answer, the stop is clean."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from systems.compose_project import MODEL, ROLES, Project
from systems.docker_engine import DockerEngine
from systems.eventually import wait_until

from pdserve.cli.http_client import ApiClient, ApiError

NUM_STREAMS = 12
RUNNING = r"^vllm:num_requests_running{.*} (\S+)"
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


def test_a_long_prompt_is_transferred_between_containers_in_shared_memory(
    project: Project, client: ApiClient
) -> None:
    answer = chat(client, PROMPT + "Which animal jumps over the dog?")
    assert answer["usage"]["prompt_tokens"] > 600

    def reported() -> tuple[str, list[float]] | None:
        """Return the metrics and byte counts once both sides have reported their load."""
        metrics = client.get("/metrics").decode()
        found = re.findall(r'pdserve_transfer_bytes_total\{transport="shm".*\} (\S+)', metrics)
        sent = [float(value) for value in found if float(value) > 1e6]
        return (metrics, sent) if len(sent) >= 2 else None

    metrics, sent = wait_until(reported, "bytes by shm")
    assert len(set(sent)) == 1, sent  # sent by prefill and verified by decode
    assert 'pdserve_prefill_requests_total{where="remote"} 1.0' in metrics


def test_the_api_key_is_required(project: Project) -> None:
    with pytest.raises(ApiError) as caught:
        ApiClient(project.url).get("/v1/models")
    assert caught.value.status == 401


def test_two_decode_workers_are_up_and_healthy(project: Project) -> None:
    lines = project.compose("ps", "--format", "{{.Service}} {{.Health}}").split("\n")
    assert sorted(line for line in lines if line) == sorted(
        f"{role} healthy" for role in (*ROLES, "decode")
    )


@pytest.mark.usefixtures("project")
def test_no_image_has_torch_and_no_process_runs_as_root(engine: DockerEngine) -> None:
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


def completions(client: ApiClient) -> list[str]:
    """Return the answers to long and short prompts that are sent concurrently; each takes a
    while."""

    def one(number: int) -> str:
        prompt = f"{number}. {PROMPT if number % 4 == 0 else 'Once upon a time'}"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0}
        return str(client.post_json("/v1/completions", body)["choices"][0]["text"])

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(one, range(NUM_STREAMS)))


def test_a_second_pool_takes_over_from_the_first(project: Project, client: ApiClient) -> None:
    pools = ("prefill", "decode"), ("prefill-b", "decode-b")
    of_old = completions(client)
    first = [container for role in pools[0] for container in project.containers(role)]
    project.compose("up", "--detach", "--wait", "--no-build", *pools[1], timeout_s=600)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(completions, client)
        wait_until(lambda: running(client) >= NUM_STREAMS // 3, "requests under way")
        project.compose("stop", *pools[0], timeout_s=180)
        answers = under_way.result()
    of_new = completions(client)
    assert [project.exit_code(container) for container in first] == [0, 0, 0]
    assert sum(a != b for a, b in zip(of_old, of_new, strict=True)) > NUM_STREAMS // 2
    matches = [text in both for text, *both in zip(answers, of_old, of_new, strict=True)]
    assert all(matches), "an answer mixes tokens of both models"
    project.compose("up", "--detach", "--wait", "--no-build", *pools[0], timeout_s=600)
    project.compose("stop", *pools[1], timeout_s=180)
    project.compose("rm", "--force", *pools[1])
    assert completions(client) == of_old


def running(client: ApiClient) -> float:
    """Return the number of requests in the workers' batches."""
    found = re.findall(RUNNING, client.get("/metrics").decode(), re.MULTILINE)
    return sum(float(value) for value in found)


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
