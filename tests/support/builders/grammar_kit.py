"""Runs requests that may wait for a grammar, and makes grammars from patterns."""

import threading
from collections.abc import Callable

from llguidance import LLMatcher

from pdserve.engine.api import Event, Grammar, Request
from pdserve.engine.engine import Engine

LIMIT_S = 60.0
Maker = Callable[..., Engine]


class Runner:
    """Steps an engine until it rests; `widths` are the rows of each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.widths: list[int] = []
        self._woken = threading.Event()
        engine.wake_with(self._woken.set)

    def step(self) -> list[Event]:
        """Return the events of the next step; none while all requests wait."""
        plan = self.engine.schedule()
        if plan is None:
            return []
        self.widths.append(len(plan.rows))
        return list(self.engine.collect(self.engine.launch(plan)).events)

    def run(self, *requests: Request) -> list[Event]:
        for request in requests:
            self.engine.submit(request)
        events: list[Event] = []
        while self.engine.has_work:
            self._woken.clear()
            found = self.step()
            events += found
            assert found or self._woken.wait(LIMIT_S), "no grammar wakes the engine"
        return events


def of_regex(pattern: str, begins_after: tuple[int, ...] = ()) -> Grammar:
    return Grammar(LLMatcher.grammar_from_regex(pattern), begins_after)
