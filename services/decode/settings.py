"""Options of a decode worker: those of every worker, and the address for KV transfer."""

from dataclasses import dataclass

from pdserve.services.host.options import option
from pdserve.services.worker.settings import WorkerSettings


@dataclass(frozen=True)
class DecodeSettings(WorkerSettings):
    """Where a decode worker listens, which routers it joins, and how KV reaches it."""

    data_bind: str = option("127.0.0.1:0", "host:port on which the worker receives KV hand-offs")
    data_advertise: str = option(
        "", "host:port at which prefill workers reach --data-bind; empty: the bound address"
    )
