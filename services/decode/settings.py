"""Options of a decode worker: those of every worker."""

from dataclasses import dataclass

from pdserve.services.host.settings import WorkerSettings


@dataclass(frozen=True)
class DecodeSettings(WorkerSettings):
    """Where a decode worker listens, whom it joins, and how KV reaches it."""
