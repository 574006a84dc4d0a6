"""Configuration of all tests: hypothesis' profiles, anyio's backend, one event loop for
coroutines, garbage collection, torch's threads, Triton's interpreter.
"""

import asyncio
import gc
import os
import signal
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM
from typing import Any

import certifi
import pytest
import uvloop
from hypothesis import HealthCheck, settings

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
gc.disable()  # until all tests are collected: imports leave little garbage

if signal.getsignal(SIGINT) is signal.SIG_IGN:
    # A shell starts background processes with SIGINT ignored, and programs that tests start would
    # inherit this.
    signal.signal(SIGINT, signal.default_int_handler)

# Every run uses the same examples, so that a failure belongs to the change; `make test-all` draws
# others with --hypothesis-profile=drawn. Neither profile fails because an example is slow or
# because rules of a state machine cannot run yet.
settings.register_profile(
    "same",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("drawn", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the C++ builds first where xdist keeps the order of files: they take longest."""
    items.sort(key=lambda item: item.path.stem != "test_native_targets")


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking the objects of the tests, about a million: each walk
    took half a second, in an arbitrary test.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # two contending threads took ten times as long under load


class WholeTest:
    """pytest's subtests, except that a skip or a timeout in a subtest ends the whole test.

    pytest catches both: the remaining subtests would run without a timeout, and no report would
    mention the skip.
    """

    def __init__(self, inner: pytest.Subtests) -> None:
        self._inner = inner

    @contextmanager
    def test(self, msg: str | None = None, **names: object) -> Iterator[None]:
        ending: BaseException | None = None
        with self._inner.test(msg, **names):
            try:
                yield
            except pytest.skip.Exception as skip:
                ending = skip
            except pytest.fail.Exception as failure:
                if not str(failure).startswith("Timeout"):
                    raise
                ending = failure
        if ending is not None:
            raise ending


@pytest.fixture
def subtests(subtests: pytest.Subtests) -> WholeTest:
    return WholeTest(subtests)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keep one event loop for all tests: grpc.aio has one poller for all loops of a process, and
    an event of a finished test's loop would raise in the next test's loop.
    """
    yield  # noqa: PT022  (a fixture that is not over keeps the loop)


@pytest.fixture(scope="session", autouse=True)
def _loops_of_services_stay_open() -> Iterator[None]:
    """Keep the loops of services that tests run in this process, for the same reason."""
    runners: list[asyncio.Runner] = []

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        runners.append(runner)
        handlers = {number: signal.getsignal(number) for number in (SIGINT, SIGTERM)}
        try:
            return runner.run(main)
        finally:
            loop = runner.get_loop()
            loop.run_until_complete(loop.shutdown_default_executor())
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():  # a closed loop would restore them
                    loop.remove_signal_handler(number)
                    signal.signal(number, handler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvloop, "run", run)
        yield
    for runner in runners:
        runner.close()


@pytest.fixture(scope="session", autouse=True)
def _clients_share_certificates() -> Iterator[None]:
    """Let HTTP clients share one context of the public authorities, which takes 15 ms to read."""
    create = ssl.create_default_context
    public = certifi.where()
    shared = create(cafile=public)

    def context(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        is_public = not args and kwargs == {"cafile": public}
        return shared if is_public else create(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give `pdserve up` a data folder that is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True)
def _blocks_add_up() -> Iterator[None]:
    """Check that the blocks add up in every engine that the test has made, whatever its state."""
    kit = sys.modules.get("builders.engine_kit")
    if kit is not None:
        kit.made.clear()
    yield
    if kit is not None:
        assert not [found for engine in kit.made if (found := engine.discrepancy(recount=True))]
        kit.made.clear()


@pytest.fixture(autouse=True)
def _coroutines_share_the_loop(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("anyio"):
        request.getfixturevalue("one_loop")
