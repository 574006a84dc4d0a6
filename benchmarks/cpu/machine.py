"""The two cores that everything runs on, and whether anything else runs on them.

Affinity is inherited: the harness pins itself, and with it all contenders, servers and clients.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

CORES = 2
QUIET = 0.10  # share of the cores that others may use
SAMPLE_S = 1.0


def two_cores() -> list[int]:
    """Two CPUs of different physical cores if possible; raises RuntimeError if there are not two
    CPUs."""
    allowed = sorted(os.sched_getaffinity(0))
    first_of_core: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        first_of_core.setdefault(core, cpu)
    chosen = [*first_of_core.values(), *(c for c in allowed if c not in first_of_core.values())]
    if len(chosen) < CORES:
        raise RuntimeError(f"the table is for {CORES} cores; this process may use {len(allowed)}")
    return chosen[:CORES]


def pin() -> list[int]:
    """Pin this process and its future children; returns the cores. Each process sets its number of
    threads."""
    cores = two_cores()
    os.environ.pop("OMP_NUM_THREADS", None)
    os.sched_setaffinity(0, cores)
    return cores


def busy_share(before: str, after: str, cores: Sequence[int]) -> float:
    """Share of the cores' time that was not idle between two readings of /proc/stat."""
    busy = total = 0
    for cpu in cores:
        ticks = [_ticks(text, cpu) for text in (before, after)]
        spent = [b - a for a, b in zip(*ticks, strict=True)]
        total += sum(spent)
        busy += sum(spent) - spent[3] - spent[4]  # idle, iowait
    return busy / total if total else 0.0


def _ticks(text: str, cpu: int) -> list[int]:
    line = next(line for line in text.splitlines() if line.startswith(f"cpu{cpu} "))
    return [int(word) for word in line.split()[1:9]]  # guest time is included in user time


def load(cores: Sequence[int]) -> float:
    """The current load by others; the caller's processes must be at rest."""
    stat = Path("/proc/stat")
    before = stat.read_text()
    time.sleep(SAMPLE_S)
    return busy_share(before, stat.read_text(), cores)


class BusyMachine(SystemExit):
    """Others use the cores, so ratios would be meaningless."""


def quiet(cores: Sequence[int], any_load: bool = False) -> float:
    """The load by others; raises BusyMachine if it is too high and not explicitly accepted."""
    found = load(cores)
    if found > QUIET and not any_load:
        raise BusyMachine(
            f"others use {found:.0%} of the cores {list(cores)}, more than {QUIET:.0%}; "
            "wait for them, or measure all the same with --any-load"
        )
    return found


def name() -> str:
    """The processor's name in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return "unknown"
