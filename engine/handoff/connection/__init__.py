"""The data connections between prefill and decode workers."""

from pdserve.engine.handoff.connection.connect import DataListeners, Dialer, usable
from pdserve.engine.handoff.connection.link import DataLink
