"""The data connections between prefill and decode workers."""

from pdserve.engine.handoff.connection.data_listeners import DataListeners
from pdserve.engine.handoff.connection.dial import Dialer, usable
from pdserve.engine.handoff.connection.link import DataLink
