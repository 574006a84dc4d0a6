"""What tests of the Python API look at behind it."""

import threading
from typing import Any

from pdserve import LLM, Engine
from pdserve.engine.scheduling.stats import EngineStats
from pdserve.services.llm.model import InProcessModel


def model_of(owner: LLM | Engine) -> InProcessModel:
    return owner._model


def stats(owner: LLM | Engine) -> EngineStats:
    """Of its engine, once what was asked of it before is done."""
    future: Any = model_of(owner)._thread.post(lambda engine: engine.stats())
    found: EngineStats = future.result()
    return found


def is_idle(owner: LLM | Engine) -> bool:
    """Whether no request is left, nor a block that one had."""
    blocks = stats(owner).blocks
    return not model_of(owner)._inboxes and blocks.free + blocks.cached == blocks.total


def engine_threads() -> int:
    """How many run."""
    return sum(thread.name == "engine" for thread in threading.enumerate())
