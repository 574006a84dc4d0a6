"""Workers die and clients disconnect in a system of real processes: no request is lost and no block
is kept."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from pages.browser import CHROMIUM, WHY_NOT, Browser
from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.late_kill import ask, kill_late, received

WORDS = "one two three four five six seven eight nine ten eleven twelve "
LENGTH, CHUNK = 1_600, 64
OPTIONS = ("--kv-tokens", "8192", "--chunk-size", str(CHUNK), "--threads", "1")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet("--prefill", "2", "--decode", "1", "--kv-transport", "tcp", *OPTIONS) as fleet:
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
    """The worker is killed late in a long prompt. Only the missing chunks are recomputed: decode
    continues from the last verified block."""
    whole, finished = ask(fleet, LENGTH, b"fault-free")
    assert finished.remote
    size = wait_until(lambda: received(fleet), "a report of decode")
    before = fleet.metric("pdserve_router_retries_total")
    killed = kill_late(fleet, LENGTH, 0.7, size, b"faulty")
    assert 0.7 <= killed.share < 1, "the worker was not killed between the first and the last frame"
    assert killed.ids == whole
    assert not killed.finished.remote, "decode did not compute the rest"
    assert killed.finished.cached_tokens == 0, (
        "verified blocks must not count as cache hits of the request"
    )
    assert 1 < killed.decoded <= (1 - killed.share) * LENGTH + 2 * CHUNK
    assert killed.prefilled == 0, "another prefill worker started the prompt"
    assert fleet.metric("pdserve_router_retries_total") > before
    wait_until(lambda: len(fleet.pids("prefill")) == 2, "a restarted prefill worker")


@pytest.mark.extended
@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_live_view_follows_a_killed_worker(fleet: Fleet) -> None:
    cards = "[...document.querySelectorAll('.worker[data-state=live]')]"
    live = f"{cards}.map((card) => card.dataset.incarnation)"
    number = len(fleet.pids("decode")) + len(fleet.pids("prefill"))
    with Browser() as page:
        page.open(f"{fleet.url}/fleet")
        page.wait(f"{live}.length === {number}")
        before = page.run(live)
        (victim,) = fleet.pids("decode")
        os.kill(victim, signal.SIGKILL)
        gone = page.wait("document.querySelector('.worker[data-state=gone]')?.dataset.incarnation")
        assert "decode" in page.text("[data-state=gone]").lower()
        page.wait(f"{live}.length === {number}")
        assert set(before) - set(page.run(live)) == {gone}
        assert page.console == []


def test_killing_decode_during_a_stream_continues_it_exactly(fleet: Fleet) -> None:
    wait_until(lambda: len(fleet.blocks()) == 3, "all workers")
    prompt = "Count on: " + WORDS
    whole = complete(fleet, prompt, max_tokens=60).choices[0].text
    text, struck = "", False
    for chunk in complete(fleet, prompt, max_tokens=60, stream=True):
        text += chunk.choices[0].text if chunk.choices else ""
        if not struck and len(text) > 40:
            (victim,) = fleet.pids("decode")
            os.kill(victim, signal.SIGKILL)
            struck = True
    assert struck
    assert text == whole


@contextmanager
def leaving(fleet: Fleet, body: dict[str, Any]) -> Iterator[None]:
    """Send a request on a separate socket and disconnect at the end of the block."""
    host, port = fleet.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + data)
        yield


def test_a_client_that_disconnects_frees_its_blocks_on_both_sides(fleet: Fleet) -> None:
    wait_until(lambda: len(fleet.blocks()) == 3 and fleet.all_blocks_back(), "a quiet fleet")
    model = client(fleet).models.list().data[0].id
    prompt = "Left early: " + WORDS * 80
    body = {"model": model, "prompt": prompt, "max_tokens": 200, "ignore_eos": True}

    def held() -> float:
        return sum(b["used"] + b["reserved"] for b in fleet.blocks().values())

    def generated() -> int:
        return sum(worker.load.generation_tokens for worker in fleet.fleet_view().workers)

    before = generated()
    with leaving(fleet, body | {"stream": True}):
        wait_until(lambda: held() > 0, "blocks held on its behalf")
    wait_until(fleet.all_blocks_back, "blocks back after the client left")
    assert generated() - before < body["max_tokens"], "the request was not aborted early"
