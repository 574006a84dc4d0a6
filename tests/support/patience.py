"""A hand-off that no clock ends, for tests whose load or pauses must not end it."""

from pdserve.engine.handoff import slow_peer
from pdserve.engine.handoff.protocol import machine

LIMITS = ((machine, "SILENCE_S"), (machine, "FROZEN_S"), (slow_peer, "SLOW_S"))


class Patience:
    """From its construction until `end`; in this process."""

    def __init__(self) -> None:
        self._before = [getattr(module, name) for module, name in LIMITS]
        for module, name in LIMITS:
            setattr(module, name, float("inf"))

    def end(self) -> None:
        for (module, name), value in zip(LIMITS, self._before, strict=True):
            setattr(module, name, value)
