"""A worker receives SIGTERM during eight streams: it exits with code 0, and no client notices."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import openai
import psutil
import pytest
from systems.eventually import LIMIT_S, wait_until
from systems.fleet import Fleet
from systems.streams import WORDS, Stream

pytestmark = pytest.mark.extended

EXTRA = {"min_tokens": 100}
LONG = "Too long to be computed where it is answered: " + WORDS * 50  # about 650 tokens
OPTIONS = ("--kv-tokens", "8192", "--chunk-size", "64", "--kv-transport", "tcp", "--threads", "1")


def streams() -> list[Stream]:
    """Return greedy and sampled streams, with penalties, log-probabilities, stop strings, echo and
    two choices."""
    each: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "echo": True},
        {"temperature": 1.0, "seed": 3, "logprobs": 2},
        {"temperature": 1.0, "seed": 4, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "stop": ["never said, never heard"]},
        {"temperature": 1.0, "seed": 9, "n": 2},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.0, "prompt": LONG},
    ]
    return [
        Stream({"prompt": f"Number {n}: {WORDS * (1 + n)}", "max_tokens": 160, **options}, EXTRA)
        for n, options in enumerate(each)
    ]


def long_streams() -> list[Stream]:
    """Return streams with long prompts, which a prefill worker computes one after the other."""
    return [
        Stream({"prompt": f"{n}. {WORDS * (46 + n)}", "max_tokens": 8, "temperature": 0.0})
        for n in range(8)
    ]


class Run:
    """Eight streams. The constructor returns when all are in progress, or immediately if the
    streams are passed in `request`."""

    def __init__(self, fleet: Fleet, request: list[Stream] | None = None) -> None:
        self.streams = request or streams()
        api = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)
        model = api.models.list().data[0].id
        self.threads = [threading.Thread(target=s.run, args=(api, model)) for s in self.streams]
        *others, last = self.threads
        last.start()
        if request is None:  # its prompt is long, and the others might end before its first token
            wait_until(lambda: self.streams[-1].num_chunks > 3, "the last stream under way")
        for thread in others:
            thread.start()
        if request is not None:
            return
        wait_until(lambda: all(s.num_chunks > 3 for s in self.streams), "streams under way")

    def end(self) -> list[tuple[Any, ...]]:
        for thread in self.threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self.threads)
        assert not any(s.error for s in self.streams), [s.error for s in self.streams]
        return [(*s.answer, s.usage.prompt_tokens) for s in self.streams]

    @property
    def num_ended(self) -> int:
        return sum(bool(s.ends) for s in self.streams)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet("--prefill", "1", "--decode", "2", *OPTIONS, drain_s=30) as fleet:
        yield fleet
    assert fleet.exit_code == 0


@pytest.fixture(scope="module")
def calm(fleet: Fleet) -> list[tuple[Any, ...]]:
    return Run(fleet).end()


def terminate(fleet: Fleet, address: str) -> None:
    """Send SIGTERM to the process that listens at the address, and wait for its end. The exit code
    must be 0: --drain-s did not cut the drain short."""
    ended = fleet.log().count("ended (exit code 0)")
    (victim,) = [
        child
        for child in psutil.Process(fleet.process.pid).children(recursive=True)
        for at in child.net_connections("tcp")
        if at.status == "LISTEN" and at.laddr.port == int(address.rpartition(":")[2])
    ]
    os.kill(victim.pid, signal.SIGTERM)
    victim.wait(LIMIT_S)
    wait_until(lambda: fleet.log().count("ended (exit code 0)") > ended, "its exit code")


def terminate_and_note(fleet: Fleet, worker: Any, reports: dict[Any, Any]) -> None:
    """Call `terminate` and store the last load that each worker reported in `reports["loads"]`."""
    reports["loads"] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for each in fleet.fleet_view().workers:
                reports["loads"][each.hello.incarnation] = each.load

    looking = threading.Thread(target=look)
    looking.start()
    terminate(fleet, worker.hello.address)
    over.set()
    looking.join()


def whole(fleet: Fleet) -> Any:
    """Return the view of the fleet once all its workers are present and idle."""

    def idle() -> Any:
        try:
            view = fleet.fleet_view()
        except grpc.RpcError:
            return None  # the router is restarting
        live = [w for w in view.workers if w.state == "live" and not w.load.running]
        return view if len(live) == 3 else None

    return wait_until(idle, "all workers")


def computed(loads: Iterable[Any]) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of recomputed tokens that the workers have
    computed."""
    found = list(loads)
    return sum(x.prompt_tokens for x in found), sum(x.recomputed_tokens for x in found)


def test_a_drained_decode_worker_migrates_its_streams(
    fleet: Fleet, calm: list[tuple[Any, ...]]
) -> None:
    before = whole(fleet)
    run = Run(fleet)
    view = fleet.fleet_view()
    decodes = [w for w in view.workers if w.hello.data_address]
    leaves = max(decodes, key=lambda w: w.load.running)
    assert leaves.load.running >= 2
    reports: dict[bytes, Any] = {}
    watch = threading.Thread(target=terminate_and_note, args=(fleet, leaves, reports))
    assert not run.num_ended
    watch.start()
    answers = run.end()
    watch.join(60)
    assert answers == calm
    after = fleet.fleet_view()
    assert after.moves - before.moves >= 2
    assert after.moved_tokens > before.moved_tokens
    assert after.moved_bytes > before.moved_bytes
    assert after.retries == before.retries, "a request was retried"
    final = reports["loads"]
    final.update({w.hello.incarnation: w.load for w in after.workers})
    first = {w.hello.incarnation: w.load for w in before.workers}
    new = computed(final[incarnation] for incarnation in first)
    old = computed(first.values())
    assert new[1] == old[1] == 0
    request = sum(answer[-1] for answer in answers)
    assert new[0] - old[0] <= request, "a prompt token was recomputed"


def test_a_drained_prefill_worker_returns_requests_that_it_has_not_started(fleet: Fleet) -> None:
    before = whole(fleet)
    run = Run(fleet, long_streams())

    def queue() -> Any:
        workers = [w for w in fleet.fleet_view().workers if not w.hello.data_address]
        return next((w for w in workers if w.load.waiting >= 2), None)

    leaves = wait_until(queue, "prompts in prefill's queue")
    terminate(fleet, leaves.hello.address)
    answers = run.end()
    view = whole(fleet)
    assert view.retries - before.retries >= 2, (
        "too few requests were returned and retried elsewhere"
    )
    assert view.prefill_remote > before.prefill_remote, "no started request was finished"
    wait_until(fleet.all_blocks_back, "blocks back")
    assert Run(fleet, long_streams()).end() == answers


@pytest.mark.parametrize("role", ["router", "gateway"])
def test_a_drained_router_or_gateway_finishes_its_streams(
    fleet: Fleet, calm: list[tuple[Any, ...]], role: str
) -> None:
    before = whole(fleet)
    run = Run(fleet)
    assert not run.num_ended
    address = fleet.router if role == "router" else fleet.url
    terminate(fleet, address)
    assert run.end() == calm
    after = whole(fleet)
    assert (after.router_incarnation != before.router_incarnation) == (role == "router")
    if role == "gateway":
        assert after.retries == before.retries
