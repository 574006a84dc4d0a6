"""Records the steps of every KV transfer, and checks recordings against the protocol."""

from pdserve.engine.handoff.recorder.conform import check
from pdserve.engine.handoff.recorder.event_log import (
    MAX_ARGUMENT,
    ROUTE,
    EventLog,
    Recording,
    RecordKind,
)
from pdserve.engine.handoff.recorder.ring import SUFFIX, RingError, open_ring, read_rings
from pdserve.engine.handoff.recorder.timeline import Entry, Timeline, describe, merge
