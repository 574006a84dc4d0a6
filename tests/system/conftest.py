"""Every system of these tests notes its hand-offs; what it noted must be what the machine says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import assert_conform


@pytest.fixture(scope="module", autouse=True)
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the rings are; checked when all systems of a module have ended."""
    folder = tmp_path_factory.mktemp("rings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_TRACE_DIR", str(folder))
        yield folder
    assert_conform(folder)
