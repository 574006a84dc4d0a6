"""The data connections over which prefill workers send KV to decode workers."""

from pdserve.engine.handoff.connection.connect import DataListeners, Dialer, usable
from pdserve.engine.handoff.connection.link import DataLink
