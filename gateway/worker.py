"""One of several gateway processes behind the same ports: what its parent passes to it."""

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """The process `index` of `num`. The parent owns the folder, and keeps the sockets open so that
    connections wait there while a process restarts."""

    index: int
    num: int
    listener: socket.socket
    unix: socket.socket | None
    folder: str
    """Private to the processes: their own sockets, metrics and counts."""
    trace_key: bytes
    """Chooses the share of traces that all of them record."""

    @property
    def metrics_folder(self) -> Path:
        return Path(self.folder) / "metrics"

    @property
    def counts_file(self) -> Path:
        return Path(self.folder) / "connections"


def worker_name(index: int) -> str:
    """Return the name of the process in logs and ps."""
    return f"gateway {index}"
