"""Records the steps of every KV transfer, and checks recordings against the protocol."""

from pdserve.engine.handoff.recorder.conform import check
from pdserve.engine.handoff.recorder.event_log import (
    MAX_ARGUMENT,
    ROUTE,
    Entry,
    EventLog,
    Recording,
    RecordKind,
    Timeline,
    describe,
    merge,
)
from pdserve.engine.handoff.recorder.ring import SUFFIX, RingError, open_ring, read_rings
