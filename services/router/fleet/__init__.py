"""The router's view of its workers: their states, loads, prefix caches, and sessions with them."""

from pdserve.services.router.fleet.compatibility import (
    COMPATIBLE_WORKER_WAIT_S,
    KvCompatibility,
    mismatch,
)
from pdserve.services.router.fleet.fleet import Fleet, ServedModels
from pdserve.services.router.fleet.prefix_index import MAX_INDEXED_BLOCKS, PrefixIndex
from pdserve.services.router.fleet.worker import (
    State,
    Worker,
    WorkerFacts,
    WorkerKind,
    taking_work,
)
from pdserve.services.router.fleet.worker_sessions import Command, Event, WorkerSessions
