"""A tiny model with its tokenizer, on both backends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.grammar_kit import Maker, Runner
from builders.tiny_models import write_tiny

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module", params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine_of(folder: Path, backend: str) -> Iterator[Maker]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        defaults = {"kv_tokens": 4096, "block_size": 32, "chunk_size": 32, "threads": 1}
        config = EngineConfig(model=str(folder), kernels=backend, **(defaults | options))
        made.append(build_engine(config)[0])
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def runner(engine_of: Maker) -> Runner:
    """Return a runner shared by all tests without special needs; its engine keeps compiled
    grammars."""
    return Runner(engine_of())
