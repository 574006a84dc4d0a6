"""A hand-off, and a request without a router, without time limits: for tests whose load or pauses
must not end them, or that show another cause of an end.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from pdserve.engine.handoff import incoming
from pdserve.engine.handoff.protocol import machine
from pdserve.services.decode import lease_machine

LIMITS = (
    *((machine, "SILENCE_S"), (machine, "FROZEN_S"), (incoming, "SLOW_S")),
    (lease_machine, "PARK_S"),
)


@contextmanager
def no_timeouts() -> Iterator[None]:
    """Remove the time limits in this process."""
    with ExitStack() as stack:
        for module, name in LIMITS:
            stack.enter_context(patch.object(module, name, 1e6))
        yield
