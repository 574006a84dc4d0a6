"""The state behind the Python API, for its tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve import LLM, Engine
from pdserve.engine.scheduling import EngineStats
from pdserve.engine.thread import EngineThread
from pdserve.llm.model import InProcessModel


def model_of(owner: LLM | Engine) -> InProcessModel:
    return owner._model


def thread_of(owner: LLM | Engine) -> EngineThread:
    return model_of(owner)._thread


def num_requests(owner: LLM | Engine) -> int:
    """Return how many requests have not ended."""
    return len(model_of(owner)._inboxes)


def stats(owner: LLM | Engine) -> EngineStats:
    """Return stats of its engine, once its earlier commands are done."""
    found: EngineStats = thread_of(owner).post(lambda engine: engine.stats()).result()
    return found


def is_idle(owner: LLM | Engine) -> bool:
    """Return whether no request remains, nor a block that one had."""
    blocks = stats(owner).blocks
    return not num_requests(owner) and blocks.free + blocks.cached == blocks.total


@contextmanager
def held(owner: LLM | Engine) -> Iterator[None]:
    """Make its engine compute nothing until the block ends."""
    go_on = threading.Event()
    thread_of(owner).post(lambda _: go_on.wait(60))
    try:
        yield
    finally:
        go_on.set()


@contextmanager
def slow(owner: LLM | Engine) -> Iterator[None]:
    """Make each of its steps take 10 ms until the block ends: a long request still runs when a
    test checks it.
    """
    full_speed = threading.Event()
    thread_of(owner).add_poll(lambda: full_speed.wait(0.01) and False)
    try:
        yield
    finally:
        full_speed.set()


def engine_threads() -> int:
    """Return how many engine threads run."""
    return sum(thread.name == "engine" for thread in threading.enumerate())
