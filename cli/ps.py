"""`pdserve ps` lists the running systems of this user on this machine, by the folders of their
runs."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdserve.cli.options import Settings
from pdserve.cli.table import table
from pdserve.cli.up.folders import STATE_FILE, is_running, run_dirs

COLUMNS = ("pid", "url", "models", "for")


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Print a table of the systems that `pdserve up` and `pdserve run` have started; return the
    exit code."""
    rows = [row(state, time.time()) for state in running()]
    print(table(COLUMNS, rows), end="")
    return 0


def running(base: Path | None = None) -> list[dict[str, Any]]:
    """Return the state of each running system with a folder in `base` (default: the folder for
    temporary files): pid, started (Unix time), url (empty until it is ready) and models."""
    states = []
    for folder in run_dirs(base):
        # Several gateways behind one port have a run folder without a state.
        with suppress(OSError, ValueError):
            if is_running(folder):
                states.append(json.loads((folder / STATE_FILE).read_text()))
    return sorted(states, key=lambda state: state["started"])


def row(state: Mapping[str, Any], now: float) -> Sequence[str]:
    seconds = int(now - state["started"])
    hours, minutes = seconds // 3600, seconds // 60 % 60
    age = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"
    return (
        str(state["pid"]),
        state["url"] or "starting",
        ", ".join(state["models"]),
        age,
    )
