"""Fixtures of the command-line tests."""

import sys
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def bare_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pytest's main module: a spawned child imports its parent's, which would cost each child
    more than all its other imports.
    """
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
