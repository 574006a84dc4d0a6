"""Runs requests that may wait for a grammar, and makes grammars of patterns."""

import time
from collections.abc import Callable

from llguidance import LLMatcher

from pdserve.engine.api.request import Event, Grammar, Request
from pdserve.engine.engine import Engine
from pdserve.engine.scheduling.plan import Plan

LIMIT_S = 60.0
Maker = Callable[..., Engine]


class Runner:
    """Steps an engine to its rest; `widths` are the rows of each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.widths: list[int] = []

    def step(self) -> list[Event]:
        """The events of the next step; none while all requests wait."""
        plan = self.engine.schedule()
        return [] if plan is None else self.run_plan(plan)

    def run_plan(self, plan: Plan) -> list[Event]:
        self.widths.append(len(plan.rows))
        return list(self.engine.collect(self.engine.launch(plan)).events)

    def run(self, *requests: Request) -> list[Event]:
        for request in requests:
            self.engine.submit(request)
        events: list[Event] = []
        deadline = time.monotonic() + LIMIT_S
        while self.engine.has_work:
            assert time.monotonic() < deadline, "not at rest"
            found = self.step()
            events += found
            if not found:
                time.sleep(0.0005)
        return events


def of_regex(pattern: str, begins_after: tuple[int, ...] = ()) -> Grammar:
    return Grammar(LLMatcher.grammar_from_regex(pattern), begins_after)
