"""Fixtures of the command line's tests."""

import sys
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def bare_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned child imports its parent's main module; pytest's would cost each of them more
    than all that it needs itself."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
