"""Options of a prefill worker: those of every worker."""

from dataclasses import dataclass

from pdserve.services.worker.settings import WorkerSettings


@dataclass(frozen=True)
class PrefillSettings(WorkerSettings):
    """Where a prefill worker listens, which routers it joins, and how its KV moves."""
