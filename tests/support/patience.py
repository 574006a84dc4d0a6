"""A hand-off that no clock ends, for tests whose load or pauses must not end it."""

from pdserve.engine.handoff import machine, pace

LIMITS = ((machine, "SILENCE_S"), (machine, "FROZEN_S"), (pace, "SLOW_S"))


class Patience:
    """From its construction until `end`; in this process."""

    def __init__(self) -> None:
        self._before = [getattr(module, name) for module, name in LIMITS]
        for module, name in LIMITS:
            setattr(module, name, float("inf"))

    def end(self) -> None:
        for (module, name), value in zip(LIMITS, self._before, strict=True):
            setattr(module, name, value)
