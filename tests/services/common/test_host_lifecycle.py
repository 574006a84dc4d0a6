"""A service ends on a signal: not serving, drain with a time limit, stop; a second signal exits at
once.
"""

import asyncio
import signal
import subprocess
import sys

import pytest
from systems.eventually import LIMIT_S

from pdserve.services.common.lifecycle import run_until_signal
from pdserve.services.common.options import ECHO_S

PROGRAM = """
import asyncio, functools, signal, sys
from pdserve.services.common.lifecycle import run_until_signal

async def main(mode):
    draining = asyncio.Event()

    async def drain():
        print("drain", flush=True)
        draining.set()
        if mode == "twice":
            signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60 if mode in ("stuck", "fail while draining") else 0.05)
        print("drained", flush=True)

    async def stop(grace):
        print("stop", flush=True)

    async def fail():
        if mode == "fail while draining":
            await draining.wait()
        raise RuntimeError("engine died")

    failed = [asyncio.ensure_future(fail())] if mode.startswith("fail") else []
    # Runs once run_until_signal waits, so its handlers are there.
    asyncio.get_running_loop().call_soon(functools.partial(print, "up", flush=True))
    return await run_until_signal(
        set_serving=lambda serving: print("serving", serving, flush=True),
        drain=drain,
        stop=stop,
        drain_s=float(sys.argv[2]),
        failed=failed,
    )

sys.exit(asyncio.run(main(sys.argv[1])))
"""


def start(mode: str, drain_s: float) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode, str(drain_s)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def rest_of(process: "subprocess.Popen[str]") -> list[str]:
    """Return its remaining output until its end. (communicate would miss what readline
    buffered.)
    """
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    process.wait(LIMIT_S)
    return lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_runs_its_steps_in_order(number: signal.Signals) -> None:
    with start("quick", 10) as process:
        process.send_signal(number)
        lines = rest_of(process)
    assert lines == ["serving False", "drain", "drained", "stop"]
    assert process.returncode == 0


def test_drain_is_bounded() -> None:
    with start("stuck", 0.2) as process:
        process.send_signal(signal.SIGTERM)
        lines = rest_of(process)
    assert lines == ["serving False", "drain", "stop"]
    assert process.returncode == 0


def test_the_same_signal_again_exits_at_once() -> None:
    with start("stuck", 60) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving False\n"
        assert process.stdout.readline() == "drain\n"
        process.send_signal(signal.SIGTERM)  # of a parent: not a second Ctrl-C
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(ECHO_S + 0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 128 + signal.SIGINT


def test_a_repeated_stop_drains_once() -> None:
    """The stop comes from the system, which signals every process, and from the parent."""
    with start("twice", 10) as process:
        process.send_signal(signal.SIGTERM)
        lines = rest_of(process)
    assert lines == ["serving False", "drain", "drained", "stop"]
    assert process.returncode == 0


def test_a_failure_of_the_service_ends_it() -> None:
    with start("fail", 10) as process:
        lines = rest_of(process)
    assert lines == ["serving False", "stop"]
    assert process.returncode == 1


def test_a_failure_during_the_drain_ends_the_drain() -> None:
    with start("fail while draining", 60) as process:
        process.send_signal(signal.SIGTERM)
        lines = rest_of(process)
    assert lines == ["serving False", "drain", "stop"]
    assert process.returncode == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ""),
        (RuntimeError("engine died"), "engine died"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_a_failure_is_logged_unless_its_owner_reports_it(
    error: BaseException | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if error is None:
        failed.set_result(None)
    elif isinstance(error, asyncio.CancelledError):
        failed.cancel()
    else:
        failed.set_exception(error)

    async def stop(grace_s: float) -> None:
        pass

    code = await run_until_signal(
        set_serving=lambda serving: None,
        drain=lambda: stop(0),
        stop=stop,
        drain_s=1.0,
        failed=(other, failed),
    )
    assert code == 1
    assert said in caplog.text
    assert len(caplog.records) == (error is not None)
