"""Workers that die and clients that leave, with real processes: nothing is lost or kept."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from browser import CHROMIUM, WHY_NOT, Browser
from eventually import wait_until
from fleet import Fleet

WORDS = "one two three four five six seven eight nine ten eleven twelve "
OPTIONS = ("--kv-tokens", "16384", "--weights", "float32", "--chunk-size", "128")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet("--prefill", "1", "--decode", "1", "--kv-transport", "tcp", *OPTIONS) as fleet:
        yield fleet


def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)


def complete(fleet: Fleet, prompt: str, **options: Any) -> Any:
    api = client(fleet)
    model = api.models.list().data[0].id
    return api.completions.create(
        model=model, prompt=prompt, temperature=0, extra_body={"ignore_eos": True}, **options
    )


def test_killing_prefill_during_a_transfer_loses_no_request(fleet: Fleet) -> None:
    prompt = "Killed in the middle of it: " + WORDS * 170  # about 2,200 tokens
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(complete(fleet, prompt, max_tokens=8)))
    before = fleet.metric("pdserve_router_retries_total")
    start = fleet.metric("pdserve_transfer_bytes_total", transport="tcp")
    thread.start()
    wait_until(
        lambda: fleet.metric("pdserve_transfer_bytes_total", transport="tcp") > start,
        "a first frame",
    )
    (victim,) = fleet.pids("prefill")
    reserved = sum(b["reserved"] for b in fleet.blocks().values())
    os.kill(victim, signal.SIGKILL)
    assert reserved > 0, "the transfer was over before the kill"
    thread.join(120)
    (answer,) = answers
    assert answer.usage.completion_tokens == 8
    assert fleet.metric("pdserve_router_retries_total") > before
    wait_until(lambda: fleet.pids("prefill"), "a restarted prefill worker")
    wait_until(fleet.all_blocks_back, "blocks back")
    assert complete(fleet, prompt, max_tokens=8).choices[0].text == answer.choices[0].text


@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_live_view_follows_a_killed_worker(fleet: Fleet) -> None:
    live = "[...document.querySelectorAll('.worker[data-state=live]')].map((e) => e.dataset.boot)"
    with Browser() as page:
        page.open(f"{fleet.url}/fleet")
        page.wait(f"{live}.length === 2")
        before = page.run(live)
        (victim,) = fleet.pids("decode")
        os.kill(victim, signal.SIGKILL)
        gone = page.wait("document.querySelector('.worker[data-state=gone]')?.dataset.boot")
        assert "decode" in page.text("[data-state=gone]").lower()
        page.wait(f"{live}.length === 2")
        assert set(before) - set(page.run(live)) == {gone}
        assert page.console == []


def test_killing_decode_during_a_stream_continues_it_exactly(fleet: Fleet) -> None:
    wait_until(lambda: len(fleet.blocks()) == 2, "both workers")
    prompt = "Count on: " + WORDS
    whole = complete(fleet, prompt, max_tokens=100).choices[0].text
    text, struck = "", False
    for chunk in complete(fleet, prompt, max_tokens=100, stream=True):
        text += chunk.choices[0].text if chunk.choices else ""
        if not struck and len(text) > 40:
            (victim,) = fleet.pids("decode")
            os.kill(victim, signal.SIGKILL)
            struck = True
    assert struck
    assert text == whole


@contextmanager
def leaving(fleet: Fleet, body: dict[str, Any]) -> Iterator[None]:
    """Sends a request on a socket of its own and hangs up at the end of the block."""
    host, port = fleet.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + data)
        yield


def test_a_client_that_leaves_frees_its_blocks_on_both_sides(fleet: Fleet) -> None:
    wait_until(lambda: len(fleet.blocks()) == 2 and fleet.all_blocks_back(), "a quiet fleet")
    model = client(fleet).models.list().data[0].id
    prompt = "Left early: " + WORDS * 170
    body = {"model": model, "prompt": prompt, "max_tokens": 200, "ignore_eos": True}

    def held() -> float:
        return sum(b["used"] + b["reserved"] for b in fleet.blocks().values())

    def generated() -> int:
        return sum(worker.load.generation_tokens for worker in fleet.fleet_view().workers)

    before = generated()
    with leaving(fleet, body | {"stream": True}):
        wait_until(lambda: held() > 0, "blocks held on its behalf")
    wait_until(fleet.all_blocks_back, "blocks back after the client left")
    assert generated() - before < body["max_tokens"], "it ended before its time"
