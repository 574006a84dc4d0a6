"""Options that prefill and decode workers share; each adds its own in a subclass."""

from dataclasses import dataclass

from pdserve.services.host.discovery.target import check_targets
from pdserve.services.host.options import BackendSettings, option

# Time limits of a worker's stop, beyond those of every service (services/host/options.py).
LEAVE_S = 2.0  # for the streams to the routers to end
CLOSE_S = 10.0  # for the engine's thread to end, and the hand-offs


@dataclass(frozen=True)
class WorkerSettings(BackendSettings):
    """Where a worker listens, which routers it joins, and how it moves KV."""

    bind: str = option("127.0.0.1:0", "host:port of the gRPC server; port 0: any free one")
    advertise: str = option("", "host:port under which others reach it; empty: as bound")
    routers: tuple[str, ...] = option(
        (),
        "host:port of routers to join, names are resolved anew; or kubernetes:///SERVICE:PORT "
        "(docs/discovery.md)",
    )
    join_routers: int = option(
        0,
        "join so many routers, the first by rendezvous hash (docs/scale.md); 0: all",
        min=0,
        max=1024,
    )
    threads: int = option(0, "compute threads; 0: one per core it may run on", min=0, max=1024)
    kv_transport: str = option(
        "auto",
        "how KV moves; auto: cuda_ipc on one GPU, shm on one host, else tcp",
        choices=("auto", "tcp", "shm", "cuda_ipc"),
    )
    shm_dir: str = option("", "folder of the unix sockets of shm; empty: a private temporary one")
    encrypt_kv: bool = option(False, "seal KV on its way with AES-GCM; prefill and decode alike")
    allow_mixed_weights: bool = option(
        False, "take KV of another format of the same model; marked inexact"
    )
    allow_mixed_numerics: bool = option(
        False, "take KV of another numerics id of the same weights; marked inexact"
    )

    def __post_init__(self) -> None:
        check_targets("--routers", self.routers)
