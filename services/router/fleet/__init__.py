"""The router's view of its workers."""

from pdserve.services.router.fleet.blobs import FleetBlobs
from pdserve.services.router.fleet.compatibility import STRANDED_S, KvCompatibility
from pdserve.services.router.fleet.fleet import Fleet, ServedModels, State, Worker, taking_work
from pdserve.services.router.fleet.prefix_index import CAPACITY, PrefixIndex
from pdserve.services.router.fleet.worker import WorkerFacts, WorkerKind, mismatch
from pdserve.services.router.fleet.worker_sessions import Event, WorkerSessions
