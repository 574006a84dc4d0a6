"""Shared systems. Every system records its hand-offs, and the records must conform to the state
machine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from oracles.rings import assert_conform
from systems.fleet import Fleet
from systems.whole import KEY, WholeSystem


@pytest.fixture(scope="module", autouse=True)
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the trace rings; check them when all systems of a module have ended."""
    folder = tmp_path_factory.mktemp("rings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_TRACE_DIR", str(folder))
        yield folder
    assert_conform(folder)


@pytest.fixture(scope="module")
def system() -> Iterator[WholeSystem]:
    """A system shared by tests of access rights. Its folder is outside pytest's, which other users
    cannot enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with WholeSystem(Path(folder)) as system:
            system.start_all()
            yield system
        assert_conform(system.rings)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with the shipped model and an API key, shared by a module's tests. They only send
    requests and kill no process."""
    folder = tmp_path_factory.mktemp("rings")
    options = ("--kv-tokens", "16384", "--api-key", KEY, "--open-metrics", "--trace-dir")
    with Fleet("--prefill", "1", "--decode", "1", *options, str(folder)) as fleet:
        yield fleet
    assert_conform(folder)


@pytest.fixture(scope="module")
def api(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
