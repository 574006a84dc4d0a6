"""A watch of EndpointSlices over TLS, against an API server with faults."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path
from random import Random

import pytest
from fakes.endpoints import FakeEndpoints
from fakes.kubernetes import EVENT_FAULTS, NAMESPACE, FakeKubernetes, endpoint_slice, in_pod
from systems.cluster_secret import SECRET
from systems.eventually import LIMIT_S, eventually, wait_until

from pdserve.gateway.settings import GatewaySettings
from pdserve.services.common import kubernetes
from pdserve.services.common.discovery import Discovery, resolve
from pdserve.services.common.endpoint_slices import EndpointSlices, parse_kubernetes
from pdserve.services.common.kubernetes_api import ApiServerError
from pdserve.services.picker import endpoints
from pdserve.services.picker.endpoints import Endpoints
from pdserve.services.worker.settings import WorkerSettings

TARGET = "kubernetes:///router:grpc"
CHANGES = 60
Find = Callable[..., Discovery]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr(kubernetes, "MAX_BACKOFF_S", 0.5)
    with in_pod(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def find() -> Iterator[Find]:
    """Return a function that makes a Discovery; at the end all are closed and their threads
    joined.
    """
    made: list[Discovery] = []
    before = set(threading.enumerate())

    def make(target: str = TARGET, ready_only: bool = True, on_change: object = None) -> Discovery:
        tell = on_change or (lambda: None)
        made.append(Discovery("--routers", [target], tell, ready_only=ready_only))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if _watches(t)])


def _watches(thread: threading.Thread) -> bool:
    return thread.name.startswith("endpoints ")


def found(discovery: Discovery) -> list[str]:
    (addresses,) = discovery.look().values()
    return addresses


@pytest.fixture
def pods(api: FakeKubernetes) -> FakeEndpoints:
    return FakeEndpoints(api, Random(1))


def says(discovery: Discovery, *hosts: str) -> None:
    """Wait until the discovery reports these addresses."""
    expected = sorted(f"{host}:50050" for host in hosts)
    wait_until(lambda: found(discovery) == expected, lambda: found(discovery))


def watched(api: FakeKubernetes) -> int:
    """Return the number of requested watches."""
    return sum("watch" in query for query in api.requests)


# --- addresses


def test_the_first_list_has_all_addresses(pods: FakeEndpoints, find: Find) -> None:
    pods.add("10.0.0.1", ready=True)
    pods.add("10.0.0.2")
    assert found(find()) == ["10.0.0.1:50050"]
    assert found(find(ready_only=False)) == ["10.0.0.1:50050", "10.0.0.2:50050"]
    assert found(find(f"kubernetes://{NAMESPACE}/router:grpc")) == ["10.0.0.1:50050"]
    assert found(find("kubernetes:///router")) == ["10.0.0.1:50050"]
    assert found(find("kubernetes:///router:7000")) == ["10.0.0.1:7000"]
    assert found(find("kubernetes://elsewhere/router:grpc")) == []
    assert found(find("kubernetes:///other:grpc")) == []


def test_changes_are_reported(pods: FakeEndpoints, find: Find) -> None:
    changed = threading.Event()
    discovery = find(on_change=changed.set)
    assert found(discovery) == []
    pod = pods.add("10.0.0.1")
    assert changed.wait(60)
    assert found(discovery) == []
    changed.clear()
    pods.set(pod, ready=True)
    assert changed.wait(60)
    assert found(discovery) == ["10.0.0.1:50050"]
    pods.set(pod, ready=True, terminating=True)
    says(discovery)
    pods.remove(pod)


@pytest.mark.anyio
async def test_a_picker_updates_on_a_change(
    api: FakeKubernetes, pods: FakeEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "RESOLVE_S", 10 * LIMIT_S)
    found = Endpoints([TARGET], time.monotonic)
    keeping = asyncio.create_task(found.keep())
    try:
        await eventually(lambda: watched(api))
        assert found.candidates(None) == []
        pod = pods.add("10.0.0.1", ready=True)
        pods.add("10.0.0.2", ready=True)
        await eventually(lambda: len(found.candidates(None)) == 2)
        pods.set(pod, ready=False)
        await eventually(lambda: len(found.candidates(None)) == 1)
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


def test_an_empty_list_is_accepted(pods: FakeEndpoints, find: Find, api: FakeKubernetes) -> None:
    pod = pods.add("10.0.0.1", ready=True)
    discovery = find()
    says(discovery, "10.0.0.1")
    api.stop()
    pods.remove(pod)
    api.compact()
    api.start()
    says(discovery)


# --- faults


@pytest.mark.parametrize("fault", EVENT_FAULTS)
def test_a_broken_watch(
    api: FakeKubernetes,
    pods: FakeEndpoints,
    find: Find,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_S", 1)
    monkeypatch.setattr(kubernetes, "SILENT_S", 0.0)
    discovery = find()
    says(discovery)
    wait_until(lambda: watched(api) == 1)
    monkeypatch.setattr("fakes.kubernetes.EVENT_FAULTS", (fault,))
    api.faults = 1.0
    pods.add("10.0.0.1", ready=True)
    wait_until(lambda: api.counts[fault])
    api.faults = 0.0
    pods.add("10.0.0.2", ready=True)
    says(discovery, "10.0.0.1", "10.0.0.2")


def test_a_watch_ends_in_time_and_resumes_at_its_version(
    api: FakeKubernetes, pods: FakeEndpoints, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_S", 1)
    monkeypatch.setattr(kubernetes, "SOON_S", 0.1)
    discovery = find()
    says(discovery)
    api.put(endpoint_slice("x", "other", []))  # only a bookmark reports its version
    wait_until(lambda: watched(api) >= 3)
    queries = [query for query in api.requests if "watch" in query]
    assert queries[0]["allowWatchBookmarks"] == "true"
    assert [query["resourceVersion"] for query in queries[:3]] == ["1", "2", "2"]
    assert len(api.requests) - watched(api) == 1, "only one list was requested"


@pytest.mark.parametrize("code", [401, 403, 410, 429, 500, 503])
def test_an_error_as_answer(
    api: FakeKubernetes, pods: FakeEndpoints, find: Find, code: int
) -> None:
    pods.add("10.0.0.1", ready=True)
    api.answers.append((code, {"Retry-After": "0"}))
    discovery = find()
    assert found(discovery) == ["10.0.0.1:50050"], "the first lookup waits for the second try"
    api.answers.append((code, {"Retry-After": "0"}))
    api.break_watches()
    pods.add("10.0.0.2", ready=True)
    says(discovery, "10.0.0.1", "10.0.0.2")


def test_the_last_view_is_kept(api: FakeKubernetes, pods: FakeEndpoints, find: Find) -> None:
    pods.add("10.0.0.1", ready=True)
    discovery = find()
    says(discovery, "10.0.0.1")
    request = len(api.requests)
    api.answers.extend([(500, {})] * 3)
    api.break_watches()
    wait_until(lambda: len(api.requests) >= request + 2)
    assert found(discovery) == ["10.0.0.1:50050"]
    api.stop()
    assert found(discovery) == ["10.0.0.1:50050"]
    api.start()
    pods.add("10.0.0.2", ready=True)
    says(discovery, "10.0.0.1", "10.0.0.2")


def test_a_server_that_starts_later(api: FakeKubernetes, pods: FakeEndpoints, find: Find,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kubernetes, "FIRST_S", 0.2)
    pods.add("10.0.0.1", ready=True)
    api.stop()
    discovery = find()
    assert found(discovery) == []
    api.start()
    says(discovery, "10.0.0.1")


def test_a_rotated_token(api: FakeKubernetes, pods: FakeEndpoints, find: Find) -> None:
    discovery = find()
    says(discovery)
    api.rotate_token(written=False)
    api.break_watches()
    request = len(api.requests)
    wait_until(lambda: len(api.requests) >= request + 2)
    pods.add("10.0.0.1", ready=True)
    api.write_token()
    says(discovery, "10.0.0.1")


def recorded_pauses(monkeypatch: pytest.MonkeyPatch, most: int = sys.maxsize) -> list[float]:
    """Record the pauses of watches from now on; `most` of them take no time."""
    pauses: list[float] = []

    class Recorded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if _watches(threading.current_thread()) and timeout is not None:
                pauses.append(timeout)
                timeout = 0.0 if len(pauses) <= most else timeout
            return super().wait(timeout)

    class Threading:
        Event, Thread = Recorded, threading.Thread

    monkeypatch.setattr(kubernetes, "threading", Threading)
    monkeypatch.setattr(kubernetes, "FIRST_S", 0.0)
    monkeypatch.setattr(kubernetes, "MAX_BACKOFF_S", 10.0)
    return pauses


def test_the_pause_after_an_error(
    api: FakeKubernetes, pods: FakeEndpoints, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses grow with each error; Retry-After is obeyed."""
    pauses = recorded_pauses(monkeypatch)
    api.answers.extend([(500, {})] * 9)
    api.answers.append((429, {"Retry-After": "3600"}))
    pods.add("10.0.0.1", ready=True)
    says(find(), "10.0.0.1")
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=False))
    assert len(pauses) >= len(bounds)


def test_endless_refusals_are_retried_at_a_bounded_pace(
    api: FakeKubernetes, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 2000

    def refuse(*request: object) -> None:
        raise ApiServerError(500, "no leader")

    monkeypatch.setattr(kubernetes.ApiServer, "get", refuse)
    pauses = recorded_pauses(monkeypatch, most=refusals)
    assert found(find()) == []
    wait_until(lambda: len(pauses) > refusals, lambda: f"{len(pauses)} refusals")
    assert all(5.0 <= pause <= 10.0 for pause in pauses[10:])


def test_an_internal_error_ends_no_watch(
    api: FakeKubernetes,
    pods: FakeEndpoints,
    find: Find,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unexpected error is logged with its traceback, and the view keeps being updated."""
    pods.add("10.0.0.1", ready=True)
    discovery = find()
    says(discovery, "10.0.0.1")
    wait_until(lambda: watched(api) == 1)
    take_event, failures = EndpointSlices.take_event, []

    def fail(slices: EndpointSlices, event: object) -> None:
        monkeypatch.setattr(EndpointSlices, "take_event", take_event)
        failures.append(event)
        raise ZeroDivisionError("an odd event")

    monkeypatch.setattr(EndpointSlices, "take_event", fail)
    pods.add("10.0.0.2", ready=True)
    says(discovery, "10.0.0.1", "10.0.0.2")
    assert len(failures) == 1
    (record,) = [r for r in caplog.records if "an odd event" in r.message]
    assert "ZeroDivisionError" in record.message
    assert record.exc_info


# --- log messages


def test_a_missing_right_is_named(
    api: FakeKubernetes, find: Find, caplog: pytest.LogCaptureFixture
) -> None:
    api.answers.extend([(403, {})] * 2)
    discovery = find()
    says(discovery)
    wait_until(lambda: watched(api))
    (text,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "scripted status 403" in text, "the API server's message"
    assert "Role with the verbs get, list and watch" in text
    assert "endpointslices of apiGroup discovery.k8s.io" in text
    assert "k8s/components/endpoint-slices" in text


def test_each_new_error_and_its_end_are_logged_once(
    api: FakeKubernetes, pods: FakeEndpoints, find: Find, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=kubernetes.__name__)
    pods.add("10.0.0.1", ready=True)
    discovery = find()
    says(discovery, "10.0.0.1")
    wait_until(lambda: watched(api) == 1)
    api.answers.extend([(500, {})] * 3)
    pods.add("10.0.0.2", ready=True)
    says(discovery, "10.0.0.1", "10.0.0.2")
    api.break_watches()
    wait_until(lambda: watched(api) == 2)
    wait_until(lambda: "again" in caplog.text)
    texts = [(r.levelname, r.message) for r in caplog.records]
    assert len([t for level, t in texts if level == "WARNING" and "500" in t]) == 1
    assert all("using the last 2 known endpoints" in t for level, t in texts if "500" in t)
    assert texts[-1] == ("INFO", "watching the EndpointSlices of router again")


# --- invalid targets


BAD_TARGETS = [
    "router",
    "router:grpc",
    "dns:///router:50050",
    "kubernetes:///",
    "kubernetes://router:grpc",
    "kubernetes:///Router:grpc",
    "kubernetes:///router:grpc/x",
    "kubernetes:///router.llm:grpc",
]


def test_an_invalid_target_is_refused(subtests: pytest.Subtests) -> None:
    error = r"--routers: .* is neither host:port nor kubernetes://"
    for target, settings in product(BAD_TARGETS, (GatewaySettings, WorkerSettings)):
        case = subtests.test(target=target, settings=settings)
        with case, pytest.raises(ValueError, match=error):
            settings(routers=(target,))


def test_targets() -> None:
    assert parse_kubernetes("kubernetes://ns/router:grpc") == ("ns", "router", "grpc")
    assert parse_kubernetes("kubernetes:///router") == ("", "router", "")
    for name in ("router:50050", "127.0.0.1:1", "[::1]:50"):
        assert parse_kubernetes(name) is None


def test_outside_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match=f"--routers {TARGET}: KUBERNETES_SERVICE_HOST"):
        Discovery("--routers", [TARGET], lambda: None, ready_only=True)
    with pytest.raises(ValueError, match=f"--endpoints {TARGET}: KUBERNETES_SERVICE_HOST"):
        Endpoints([TARGET], time.monotonic)


@pytest.mark.parametrize(
    ("role", "option", "words"),
    [
        ("gateway", "--routers", ()),
        ("decode", "--routers", ("--model", "no-such-model")),  # before it has loaded a model
        ("picker", "--routers", ()),
        ("picker", "--endpoints", ("--routers", "127.0.0.1:9")),
    ],
)
def test_a_process_outside_a_pod_reports_it_at_once(
    role: str, option: str, words: tuple[str, ...]
) -> None:
    command = [sys.executable, "-P", "-m", "pdserve.cli.main", role, option, TARGET]
    command += words
    env = {name: value for name, value in os.environ.items() if "KUBERNETES" not in name}
    env["PDSERVE_CLUSTER_SECRET"] = SECRET
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert f"{option} {TARGET}: KUBERNETES_SERVICE_HOST" in done.stderr
    assert "Traceback" not in done.stderr


def test_resolve() -> None:
    assert resolve("127.0.0.1:50") == ["127.0.0.1:50"]
    assert resolve("[::1]:50") == ["[::1]:50"]
    assert resolve("no port") == []
    assert resolve("host.invalid:1") == []


def test_only_processes_with_discovery_import_it() -> None:
    """Other processes start without importing it."""
    code = (
        "import sys; from pdserve.services.worker.membership import Membership;"
        "print([m for m in sys.modules if m.startswith('pdserve.services.common.')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert "common.discovery" in done.stdout, done.stderr
    assert "common.kubernetes" not in done.stdout


def test_close_does_not_wait_for_a_watch(api: FakeKubernetes, find: Find) -> None:
    """A watch waits most of a minute for a server that sends nothing."""
    discovery = find()
    says(discovery)
    wait_until(lambda: watched(api))
    began = time.monotonic()
    discovery.close()
    assert time.monotonic() - began < 1.0
    wait_until(lambda: not any(map(_watches, threading.enumerate())), "the thread's end", 5.0)


# --- combined


def test_changes_with_broken_watches_reach_the_final_state(
    api: FakeKubernetes, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_S", 1)
    monkeypatch.setattr(kubernetes, "SILENT_S", 0.2)
    monkeypatch.setattr(kubernetes, "SOON_S", 0.2)
    rng = Random(20)
    pods = FakeEndpoints(api, rng)
    views = {ready: find(ready_only=ready) for ready in (True, False)}
    for number in count():  # a busy machine watches less often, and meets fewer faults
        if (number >= CHANGES and len(api.counts) > 5) or number > 10 * CHANGES:
            break
        api.faults = 0.3
        pods.change()
        if number % 20 == 10:
            api.compact()
        if number % 20 == 15:
            api.stop()
            pods.change()
            api.start()
        time.sleep(0.02)  # time for watches to report the change
        if number % 6 == 5:
            api.faults = 0.0
            for ready, discovery in views.items():
                true = pods.addresses(ready)
                wait_until(lambda d=discovery, t=true: found(d) == t, api.counts)  # type: ignore[misc]
    assert len(api.counts) > 5, api.counts
