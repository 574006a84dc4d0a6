"""How much memory a KV pool may take: the least of what host, cgroup or GPU has left."""

from pathlib import Path

import torch

CPU_SHARE, CUDA_SHARE = 0.5, 0.85  # of the free memory; the rest is for activations and others
_CGROUPS = (  # (limit, usage, statistics, name of the reclaimable page cache in them)
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),  # version 2
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def pool_bytes(device: str, engines: int) -> int:
    """Bytes for the KV pool of one of `engines` engines on this machine."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free * CUDA_SHARE) // engines
    return int(free_host_bytes() * CPU_SHARE) // engines


def free_host_bytes(
    proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """What can be allocated without swapping, inside this process's cgroup."""
    available = _named_values(proc)["MemAvailable:"] * 1024
    for limit, usage, statistics, reclaimable in _CGROUPS:
        try:
            most = (cgroup / limit).read_text().strip()
            if most == "max":
                continue
            used = int((cgroup / usage).read_text())
            cached = _named_values(cgroup / statistics).get(reclaimable, 0)
        except OSError:
            continue  # not this version of cgroups
        available = min(available, max(0, int(most) - used + cached))
    return available


def _named_values(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
