"""Children are restarted, stopped in order, killed after the time limit, and never orphaned."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes import service as fake_service
from systems.eventually import LIMIT_S

from pdserve.cli.up.child import ForkServer, Task
from pdserve.cli.up.cores import Share
from pdserve.cli.up.supervisor import Child, OnEvent, StartError, Supervisor, restart_delay
from pdserve.engine.api import EngineConfig

SUPPORT = str(Path(__file__).parents[1] / "support")
Events = list[tuple[str, str, dict[str, Any]]]


@pytest.fixture
def events() -> Events:
    return []


def noting(events: Events) -> OnEvent:
    return lambda child, event, figures: events.append((child.name, event, figures))


@pytest.fixture
def supervisor(events: Events) -> Iterator[Supervisor]:
    with Supervisor(noting(events)) as made:
        yield made


@pytest.fixture
def forking(events: Events) -> Iterator[Supervisor]:
    with Supervisor(noting(events), preload=["fakes.service"]) as made:
        yield made


def start(supervisor: Supervisor, behaviour: str, *args: Any, share: Share | None = None) -> Child:
    task = Task(f"fakes.service:{behaviour}", args, share)
    return supervisor.start(behaviour, lambda: task)


def all_ready(supervisor: Supervisor) -> bool:
    return supervisor.run_until(lambda: all(c.ready for c in supervisor.children), LIMIT_S)


def test_a_child_gets_its_share_before_any_import(supervisor: Supervisor, events: Events) -> None:
    core = min(os.sched_getaffinity(0))
    child = start(supervisor, "good", "an argument", share=Share(1, (core,)))
    assert all_ready(supervisor)
    assert [event for _, event, _ in events] == ["listening", "loading", "ready"]
    facts = child.figures
    assert facts["cores"] == [core]
    assert (facts["omp"], facts["wait"], facts["torch"]) == ("1", "PASSIVE", False)
    assert facts["args"] == ["'an argument'"]
    assert facts["pgid"] == facts["pid"]
    assert supervisor.stop([[child]], LIMIT_S)
    assert not psutil.pid_exists(facts["pid"])


def test_a_killed_child_is_restarted_at_once(supervisor: Supervisor, events: Events) -> None:
    child = start(supervisor, "good")
    assert all_ready(supervisor)
    first = child.figures["pid"]
    os.kill(first, signal.SIGKILL)
    assert supervisor.run_until(lambda: child.restarts == 1 and child.ready, LIMIT_S)
    assert child.figures["pid"] != first
    assert ("good", "restart", {}) in events
    died = next(figures for _, event, figures in events if event == "died")
    assert died["code"] == -signal.SIGKILL
    assert died["restart_s"] == 0


def test_a_child_that_dies_again_is_restarted_with_a_delay(
    supervisor: Supervisor, events: Events
) -> None:
    child = start(supervisor, "mortal")
    assert supervisor.run_until(lambda: child.deaths_in_a_row == 2, LIMIT_S)
    assert child.restarts == 1
    assert child.restart_at is not None
    assert [figures["restart_s"] for _, event, figures in events if event == "died"] == [0, 1]


def test_restart_delays() -> None:
    assert [restart_delay(n) for n in range(1, 9)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_child_that_never_was_ready_is_an_error(supervisor: Supervisor) -> None:
    start(supervisor, "broken")
    with pytest.raises(StartError, match=r"broken could not start: no such model: nowhere\.gguf"):
        all_ready(supervisor)


@pytest.mark.parametrize("serving", [False, True])
def test_a_child_killed_before_it_was_ready(serving: bool, events: Events) -> None:
    """Its death does not end a system that already serves."""
    with Supervisor(noting(events), serving=lambda: serving) as supervisor:
        child = start(supervisor, "slow")
        supervisor.run_until(lambda: "pid" in child.figures, LIMIT_S)
        os.kill(child.figures["pid"], signal.SIGKILL)
        if serving:
            assert supervisor.run_until(lambda: child.restarts == 1, LIMIT_S)
        else:
            with pytest.raises(StartError, match="slow could not start"):
                supervisor.run_until(lambda: False, LIMIT_S)


def test_a_child_that_fails_while_the_system_serves(events: Events) -> None:
    """The child is restarted, whether it reports a load error or the system refuses a process."""
    starts: list[int] = []

    def make() -> Task:
        starts.append(len(starts))
        if len(starts) == 2:
            raise BlockingIOError("no more processes")
        return Task("fakes.service:broken" if len(starts) == 1 else "fakes.service:good", ())

    with Supervisor(noting(events), serving=lambda: True) as supervisor:
        child = supervisor.start("late", make)
        assert supervisor.run_until(lambda: child.ready, LIMIT_S)
    assert [figures["code"] for _, event, figures in events if event == "died"][:2] == [1, None]


@pytest.mark.parametrize("preload", [(), ("fakes.service",)])
def test_sighup_is_forwarded_to_children_that_reload(
    preload: tuple[str, ...], events: Events
) -> None:
    with Supervisor(noting(events), preload, reloading=("reloading",)) as supervisor:
        children = [start(supervisor, "reloading"), start(supervisor, "good")]
        assert all_ready(supervisor)
        os.kill(os.getpid(), signal.SIGHUP)
        assert supervisor.run_until(lambda: "reloads" in children[0].figures, LIMIT_S)
        assert supervisor.signals == []
        assert supervisor.stop([children], LIMIT_S)
    assert [child.deaths_in_a_row for child in children] == [1, 1]


def test_an_unexpected_failure_is_named(supervisor: Supervisor) -> None:
    start(supervisor, "surprised")
    with pytest.raises(StartError, match=r"KeyError: 'oops'"):
        all_ready(supervisor)


def test_a_task_that_runs_once(supervisor: Supervisor, events: Events) -> None:
    configs = [EngineConfig(model="encoder"), EngineConfig(model="other")]
    task = Task("fakes.service:model_check", (configs,))
    (first, second) = supervisor.run("check", lambda: task)["models"]
    assert (first["uses_prefill"], second["uses_prefill"]) == (False, True)
    assert supervisor.children == []
    with pytest.raises(StartError, match=r"^no such model: nowhere\.gguf$"):
        supervisor.run("broken", lambda: Task("fakes.service:broken", ()))
    with pytest.raises(StartError, match=r"^killed ended \(signal 9\)$"):
        supervisor.run("killed", lambda: Task("fakes.service:killed", ()))
    assert not [event for _, event, _ in events if event in ("died", "restart")]


def test_a_signal_ends_a_task_that_runs_once(events: Events) -> None:
    def on_event(child: Child, event: str, figures: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # once it has reported its pid

    with Supervisor(on_event) as supervisor:
        pid = supervisor.run("slow", lambda: Task("fakes.service:slow", ()))["pid"]
        assert supervisor.signals == [signal.SIGTERM]
    assert not psutil.pid_exists(pid)


def test_stages_end_in_order(supervisor: Supervisor, tmp_path: Path) -> None:
    log = tmp_path / "order"
    children = [start(supervisor, "logged", str(log), name) for name in "abc"]
    assert all_ready(supervisor)
    assert supervisor.stop([[children[2]], [children[0]], [children[1]]], LIMIT_S)
    assert log.read_text().split() == ["c", "a", "b"]


def test_a_stubborn_child_is_killed_after_the_time_limit(supervisor: Supervisor) -> None:
    children = [start(supervisor, "stubborn"), start(supervisor, "good")]
    assert all_ready(supervisor)
    started = time.monotonic()
    assert not supervisor.stop([children], 0.5)
    assert time.monotonic() - started >= 0.5
    assert not any(psutil.pid_exists(child.figures["pid"]) for child in children)


def test_a_second_signal_kills_at_once(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(supervisor, "stubborn")
    assert all_ready(supervisor)
    monkeypatch.setattr("pdserve.cli.up.supervisor.ECHO_S", LIMIT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor.run_until(lambda: False, 5.0)
    os.kill(os.getpid(), signal.SIGINT)  # an echo of the first
    assert supervisor.signals == [signal.SIGTERM]
    monkeypatch.setattr("pdserve.cli.up.supervisor.ECHO_S", 0.1)
    again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    again.start()
    assert not supervisor.stop([[child]], 10 * LIMIT_S)
    again.join()
    assert not psutil.pid_exists(child.figures["pid"])


def test_forked_children_share_one_import(forking: Supervisor) -> None:
    share = Share(1, (min(os.sched_getaffinity(0)),))
    child, other = (start(forking, "good", share=share) for _ in range(2))
    assert all_ready(forking)
    server = child.figures["imported_by"]
    assert server not in (os.getpid(), child.figures["pid"])
    assert child.figures["ppid"] == other.figures["ppid"] == server
    assert other.figures["imported_by"] == server
    assert len(os.listdir(f"/proc/{server}/task")) == 1
    assert child.figures["pgid"] == child.figures["pid"] != other.figures["pgid"]
    assert child.figures["cores"] == list(share.cores)
    assert child.figures["blocked"] == [signal.SIGTERM]  # which the service itself blocks
    assert child.figures["num_fds"] == other.figures["num_fds"]  # it inherits none of its siblings'
    os.kill(child.figures["pid"], signal.SIGKILL)
    assert forking.run_until(lambda: child.restarts == 1 and child.ready, LIMIT_S)
    assert child.figures["imported_by"] == server
    assert child.figures["num_fds"] == other.figures["num_fds"]
    assert forking.stop([[child, other]], LIMIT_S)
    assert not any(psutil.pid_exists(c.figures["pid"]) for c in (child, other))


def test_signals_leave_the_fork_server_alone(forking: Supervisor) -> None:
    """The children end in order, so the fork server must live until they have ended."""
    child = start(forking, "good")
    assert all_ready(forking)
    server = child.figures["imported_by"]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(server, number)
    other = start(forking, "good")
    assert all_ready(forking)
    assert other.figures["imported_by"] == server
    assert (child.deaths_in_a_row, other.deaths_in_a_row) == (0, 0)


def test_exit_codes_of_forked_children(forking: Supervisor, events: Events) -> None:
    child = start(forking, "mortal")
    assert forking.run_until(lambda: child.restarts == 1 and child.deaths_in_a_row == 2, LIMIT_S)
    assert [figures["code"] for _, event, figures in events if event == "died"] == [3, 3]


def test_a_forked_child_that_never_was_ready_is_an_error(forking: Supervisor) -> None:
    start(forking, "broken")
    with pytest.raises(StartError, match=r"broken could not start: no such model: nowhere\.gguf"):
        all_ready(forking)


def test_the_fork_server_ends_with_the_supervisor(events: Events) -> None:
    with Supervisor(noting(events), preload=["fakes.service"]) as supervisor:
        child = start(supervisor, "stubborn")
        assert all_ready(supervisor)
        server = psutil.Process(child.figures["pid"]).parent()
    assert server is not None
    assert not server.is_running()
    assert not psutil.pid_exists(child.figures["pid"])


def test_children_come_back_when_the_fork_server_is_killed(
    forking: Supervisor, events: Events
) -> None:
    child = start(forking, "good")
    assert all_ready(forking)
    first = psutil.Process(child.figures["pid"])
    server = psutil.Process(child.figures["imported_by"])
    server.kill()
    assert forking.run_until(lambda: child.restarts == 1 and child.ready, LIMIT_S)
    assert ended(first)
    assert [figures["code"] for _, event, figures in events if event == "died"] == [-9]
    other = start(forking, "good")  # by now the supervisor knows that the server is dead
    assert all_ready(forking)
    assert other.figures["imported_by"] == other.figures["ppid"] not in (server.pid, os.getpid())


def test_a_child_is_spawned_if_the_fork_server_dies(caplog: pytest.LogCaptureFixture) -> None:
    with Supervisor(noting([]), preload=["fakes.service", "fakes.crash"]) as supervisor:
        child = start(supervisor, "good")
        assert all_ready(supervisor)
        assert child.figures["imported_by"] == child.figures["pid"]
        assert child.figures["ppid"] == os.getpid()
    assert "good is spawned, since it could not be forked" in caplog.text


def test_a_refused_fork_leaves_siblings_running(caplog: pytest.LogCaptureFixture) -> None:
    with Supervisor(noting([]), preload=["fakes.service", "fakes.refusal"]) as supervisor:
        spawned, child, other = (start(supervisor, "good") for _ in range(3))
        assert all_ready(supervisor)
        assert "could not be forked: no more processes" in caplog.text
        assert spawned.figures["ppid"] == os.getpid()
        server = child.figures["ppid"]
        assert server not in (os.getpid(), other.figures["pid"])
        assert other.figures["ppid"] == server
        assert child.figures["num_fds"] == other.figures["num_fds"]


def test_an_unreadable_task_leaves_siblings_running(forking: Supervisor) -> None:
    child = start(forking, "good")
    assert all_ready(forking)
    start(forking, "stubborn", fake_service.Unreadable())
    with pytest.raises(StartError, match="stubborn could not start"):
        all_ready(forking)
    assert child.ready
    assert child.deaths_in_a_row == 0


def test_a_fork_server_that_hangs_is_killed(
    forking: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another fork server starts its children again."""
    child = start(forking, "good")
    assert all_ready(forking)
    server = psutil.Process(child.figures["imported_by"])
    server.suspend()
    with monkeypatch.context() as patch:
        patch.setattr("pdserve.cli.up.child.ANSWER_S", 0.1)
        spawned = start(forking, "good")
    assert "does not respond" in caplog.text
    assert not server.is_running()
    assert forking.run_until(lambda: child.restarts == 1 and child.ready, LIMIT_S)
    assert all_ready(forking)
    assert spawned.figures["ppid"] == os.getpid()
    assert child.figures["ppid"] not in (server.pid, os.getpid())


@pytest.mark.parametrize("forked", [False, True])
def test_a_start_that_the_system_refuses(
    forked: bool, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start it is an error; later the child starts again, and the others keep
    running.
    """

    def refuse(*args: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("pdserve.cli.up.supervisor.restart_delay", lambda deaths: 0.1)
    preload = ["fakes.service"] if forked else []
    with Supervisor(noting(events), preload) as supervisor:
        child, other = (start(supervisor, "good") for _ in range(2))
        assert all_ready(supervisor)
        with monkeypatch.context() as patch:
            patch.setattr(ForkServer, "fork", refuse)
            patch.setattr(Supervisor, "_spawn", refuse)
            with pytest.raises(StartError, match="stubborn could not start: no more processes"):
                start(supervisor, "stubborn")
            os.kill(child.figures["pid"], signal.SIGKILL)
            assert supervisor.run_until(lambda: child.deaths_in_a_row == 3, LIMIT_S)
            assert child.failure == "no more processes"
        assert supervisor.run_until(lambda: child.ready, LIMIT_S)
        assert other.deaths_in_a_row == 0
        assert supervisor.stop([[child, other]], LIMIT_S)


def test_preloaded_modules_start_no_thread_and_import_no_torch() -> None:
    code = (
        "import importlib, os, sys\n"
        "from pdserve.cli.up.command import PRELOAD\n"
        "for name in PRELOAD: importlib.import_module(name)\n"
        "assert len(PRELOAD) == 3\n"
        "assert 'numpy' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )


@pytest.mark.parametrize("preload", [(), ("fakes.service",)])
def test_no_orphan_when_the_parent_is_killed(preload: tuple[str, ...]) -> None:
    """The whole tree ends although the parent could do nothing."""
    code = (
        "import os\n"
        "from pdserve.cli.up.child import Task\n"
        "from pdserve.cli.up.supervisor import Supervisor\n"
        "if __name__ == '__main__':\n"
        f"    with Supervisor(lambda *_: None, {preload}) as s:\n"
        "        c = s.start('x', lambda: Task('fakes.service:stubborn', ()))\n"
        "        assert s.run_until(lambda: c.ready, 20)\n"
        "        print(c.figures['pid'], flush=True)\n"
        "        s.run_until(lambda: False)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SUPPORT},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        server = child.parent()
        assert server is not None
        assert (server.pid != parent.pid) == bool(preload)
        parent.kill()
        psutil.wait_procs([child, server], timeout=LIMIT_S)
        assert ended(child)
        assert ended(server)


def ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; an orphan may remain as a zombie until it is reaped."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_child_can_end_the_system_as_sigterm_does(supervisor: Supervisor) -> None:
    children = [start(supervisor, "good")]
    assert all_ready(supervisor)
    children.append(start(supervisor, "ending"))
    assert supervisor.run_until(lambda: False, LIMIT_S)
    assert supervisor.signals == [signal.SIGTERM]
    assert supervisor.stop([children], LIMIT_S), "no child was killed"
    assert not any(psutil.pid_exists(child.figures["pid"]) for child in children)
