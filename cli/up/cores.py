"""Assigns the machine's CPU cores to the workers of `pdserve up`.

Two thread pools on one core cost milliseconds per operation, so each worker gets cores that no
other worker uses, as long as there are enough. Gateway and router, which mostly wait, may use all
cores.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.options import OptionError

QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Share:
    """One process's share of the machine: its number of compute threads, and the cores to which it
    is pinned (empty: not pinned)."""

    threads: int
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.cores:
            return f"{self.threads} thread{'s' * (self.threads > 1)}, not pinned"
        first, last = self.cores[0], self.cores[-1]
        if len(self.cores) > 1 and last - first == len(self.cores) - 1:
            return f"cores {first}-{last}"
        return f"core{'s' * (len(self.cores) > 1)} {','.join(map(str, self.cores))}"


def machine_cores() -> tuple[tuple[int, ...], int]:
    """Return the cores on which this process may run, and how many of them its cgroup quota allows
    it to use."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    try:
        quota, period = QUOTA.read_text().split()
        num_usable = len(cores) if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        num_usable = len(cores)
    return cores, min(len(cores), num_usable)


def allot(cores: Sequence[int], num_usable: int, workers: int, threads: int = 0) -> list[Share]:
    """Return each worker's share of the cores: `threads` cores each; if `threads` is 0, all cores
    divided among the workers.

    Under a quota (`num_usable` is less than the number of cores) workers are not pinned, because
    neighbouring containers with the same quota would all choose the same cores. Raises OptionError
    if `threads` for all workers exceeds the usable cores; one thread per worker is always allowed.
    """
    if threads > 1 and threads * workers > num_usable:
        raise OptionError(
            f"--threads {threads}: {workers} worker{'s' * (workers > 1)} need "
            f"{threads * workers} cores, but only {num_usable} are usable"
        )
    if threads:
        counts = [threads] * workers
    elif workers <= num_usable:
        counts = [num_usable // workers + (n < num_usable % workers) for n in range(workers)]
    else:
        counts = [1] * workers
    if num_usable < len(cores) or sum(counts) > num_usable:
        return [Share(count) for count in counts]
    starts = [sum(counts[:n]) for n in range(workers)]
    return [
        Share(count, tuple(cores[start : start + count]))
        for start, count in zip(starts, counts, strict=True)
    ]


def take(share: Share) -> None:
    """Pin this process to the cores of its share, and set its thread counts. Call before torch is
    imported."""
    if share.cores:
        os.sched_setaffinity(0, share.cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(share.threads)
    # Waiting threads must not spin: they would take cores from the gateway and the router.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["KMP_BLOCKTIME"] = "0"
