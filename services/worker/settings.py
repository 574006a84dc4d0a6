"""Options of prefill and decode workers."""

from dataclasses import dataclass

from pdserve.services.common.discovery import check_targets
from pdserve.services.common.options import BackendSettings, option

# Time limits of a worker's stop, beyond those of every service (services/common/options.py).
DEREGISTER_S = 2.0  # for the streams to the routers to end
ENGINE_CLOSE_S = 10.0  # for the engine's thread to end, and the hand-offs


@dataclass(frozen=True)
class WorkerSettings(BackendSettings):
    """Options that prefill and decode workers have in common: addresses, routers to join, KV
    transport."""

    bind: str = option("127.0.0.1:0", "host:port of the gRPC server; port 0: any free port")
    advertise: str = option(
        "", "host:port at which other processes reach the worker; empty: the bound address"
    )
    routers: tuple[str, ...] = option(
        (),
        "host:port of routers to join; names are resolved again every second; or "
        "kubernetes:///SERVICE:PORT (docs/discovery.md)",
    )
    join_routers: int = option(
        0,
        "number of routers to join, chosen by rendezvous hash (docs/scale.md); 0: all",
        min=0,
        max=1024,
    )
    threads: int = option(
        0, "compute threads; 0: one per core that the process may use", min=0, max=1024
    )
    kv_transport: str = option(
        "auto",
        "transport for KV; auto: cuda_ipc on one GPU, shm on one host, else tcp",
        choices=("auto", "tcp", "shm", "cuda_ipc"),
    )
    shm_dir: str = option(
        "", "folder for the unix sockets of the shm transport; empty: a private temporary folder"
    )
    encrypt_kv: bool = option(
        False, "encrypt KV in transfer with AES-GCM; set it on prefill and decode workers alike"
    )
    allow_mixed_weights: bool = option(
        False,
        "accept KV from workers with another weight format of the same model; answers are marked "
        "inexact",
    )
    allow_mixed_numerics: bool = option(
        False,
        "accept KV from workers with another numerics id of the same weights; answers are marked "
        "inexact",
    )

    def __post_init__(self) -> None:
        check_targets("--routers", self.routers)


@dataclass(frozen=True)
class PrefillSettings(WorkerSettings):
    """Options of a prefill worker: addresses, routers to join, and how it sends KV."""


@dataclass(frozen=True)
class DecodeSettings(WorkerSettings):
    """Options of a decode worker: addresses, routers to join, and how it receives KV."""

    data_bind: str = option("127.0.0.1:0", "host:port on which the worker receives KV hand-offs")
    data_advertise: str = option(
        "", "host:port at which prefill workers reach --data-bind; empty: the bound address"
    )
