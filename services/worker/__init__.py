"""What prefill and decode workers share: process, membership, reports."""

from pdserve.services.worker.core import RouterSession, WorkerCore, service_error, when_done
from pdserve.services.worker.process import WorkerRole, run_worker
from pdserve.services.worker.runtime import WorkerRuntime, load_of
from pdserve.services.worker.settings import (
    DEREGISTER_S,
    ENGINE_CLOSE_S,
    DecodeSettings,
    PrefillSettings,
    WorkerSettings,
)
