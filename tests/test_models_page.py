"""docs/models.md says what the code knows, and what it says is tested."""

import subprocess
import sys
from pathlib import Path

from models_page import MAPPINGS_TEST

from pdserve.engine.architectures import find_spec

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/models.md").read_text()


def test_the_page_is_as_the_code() -> None:
    """In a process of its own: other tests add architectures and formats."""
    program = [sys.executable, str(ROOT / "tests/support/models_page.py")]
    made = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert made == PAGE, "`make docs` writes docs/models.md anew"


def test_every_architecture_stands_in_it() -> None:
    modules = (ROOT / "engine/architectures").glob("[a-z]*.py")
    rows = {line.split(" | ")[-1].strip(" |"): line for line in PAGE.splitlines()}
    for module in modules:
        name = rows[module.name].split("`")[1]
        assert name in find_spec({"architectures": [name]}).architectures
    assert (ROOT / MAPPINGS_TEST).exists()
