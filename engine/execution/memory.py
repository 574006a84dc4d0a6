"""Host memory: measures how much is free for a KV pool, and makes the process keep memory that
torch frees."""

import ctypes
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
HOST_SHARE = 0.5  # of the free memory; the rest is for activations and others
_CGROUPS = (  # (limit, usage, statistics, name of the reclaimable page cache in them)
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),  # version 2
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_host_bytes(
    proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return how many bytes this process can allocate without swapping, within the limit of its
    cgroup."""
    available = _named_values(proc)["MemAvailable:"] * 1024
    for limit, usage, statistics, reclaimable in _CGROUPS:
        try:
            max_bytes = (cgroup / limit).read_text().strip()
            if max_bytes == "max":
                continue
            used = int((cgroup / usage).read_text())
            cached = _named_values(cgroup / statistics).get(reclaimable, 0)
        except OSError:
            continue  # not this version of cgroups
        available = min(available, max(0, int(max_bytes) - used + cached))
    return available


def _named_values(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1}


def keep_freed_memory() -> None:
    """Make glibc keep large freed memory blocks for reuse. By default glibc returns them to the
    kernel at once, and the cost of clearing new pages for each operation slows torch down by a
    tenth. Has no effect with another libc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc's maximum
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)
