"""Breadth-first search over all states of a configuration; the first violation is a shortest one.

Visited states are kept as 64-bit hashes (hash compaction): with n states the chance that two of
them share one, so that a part of the space is missed, is about n^2 / 2^65: 1 in 300,000 at ten
million. A trace is reconstructed by replaying the moves that led to its state.
"""

import gc
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from oracles.handoff_model import decode, faults, prefill, router
from oracles.handoff_model.config import Config
from oracles.handoff_model.invariants import check_end, check_state
from oracles.handoff_model.router import Move
from oracles.handoff_model.rules import Rules, Violation
from oracles.handoff_model.state import Model, State, World

THAWS = (decode.thaw, prefill.thaw)


@dataclass
class Result:
    """The result of one run. `trace` is empty if nothing was violated."""

    config: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0  # states without a further move
    seconds: float = 0.0
    complete: bool = False
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)  # moves by name


def own_moves(w: World) -> Iterator[Move]:
    """Return the moves that processes make by themselves."""
    yield from router.moves(w)
    yield from decode.moves(w)
    yield from prefill.moves(w)


def explore(
    config: Config, rules: Rules | None = None, wanted: str = "", max_seconds: float = 1e9
) -> Result:
    """Explore all reachable states, or those up to the first violation whose message begins with
    `wanted`; a path with another violation is not followed further.
    """
    search = _Search(Model(config, rules or Rules()), wanted)
    gc.disable()  # nothing here is cyclic, and there are millions of tuples
    try:
        search.run(max_seconds)
    finally:
        gc.enable()
    return search.result


def name(move: Callable[..., Any]) -> str:
    """Return the process and the name of a move."""
    return f"{move.__module__.rpartition('.')[2]} {move.__name__}"


class _Search:
    def __init__(self, model: Model, wanted: str) -> None:
        self.model = model
        self.wanted = wanted
        self.result = Result(model.config.name)
        self.parents = array("l", [-1])  # by state, in order of discovery
        self.chosen = array("H", [0])  # which move of the parent led here
        self.happened: Counter[Callable[..., Any]] = Counter()

    def run(self, max_seconds: float) -> None:
        started = time.monotonic()
        first = self.model.initial()
        seen = {hash(first)}
        frontier = [first]
        index = 0
        while frontier and not self.result.violation:
            if time.monotonic() - started > max_seconds:
                break
            frontier = self._layer(frontier, index, seen)
            index = len(seen) - len(frontier)
            self.result.depth += bool(frontier)
        self.result.states = len(seen)
        self.result.complete = not frontier and not self.result.violation
        self.result.seconds = round(time.monotonic() - started, 1)
        self.result.happened = Counter({name(f): n for f, n in self.happened.items()})

    def _layer(self, frontier: list[State], index: int, seen: set[int]) -> list[State]:
        """Visit every state one move away from the frontier, whose first state has this index."""
        model, happened = self.model, self.happened
        found: list[State] = []
        for at, state in enumerate(frontier, index):
            w = World(model, state)
            try:
                check_state(w)
            except Violation as violation:
                if self._fail(at, None, violation):
                    return []
                continue
            moves = list(own_moves(w))
            num_own = len(moves)
            moves += faults.moves(w)
            stuck = True
            for number, (act, *words) in enumerate(moves):
                after = World(model, state)
                try:
                    if act(after, *words) is False:  # type: ignore[operator]
                        continue
                except Violation as violation:
                    if self._fail(at, number, violation):
                        return []
                    continue
                if number < num_own and act not in THAWS:
                    stuck = False
                happened[act] += 1  # type: ignore[index]
                self.result.transitions += 1
                new = after.freeze()
                mark = hash(new)
                if mark not in seen:
                    seen.add(mark)
                    found.append(new)
                    self.parents.append(at)
                    self.chosen.append(number)
            if stuck:
                self.result.ends += 1
                try:
                    check_end(w)
                except Violation as violation:
                    if self._fail(at, None, violation):
                        return []
        return found

    def _fail(self, at: int, number: int | None, violation: Violation) -> bool:
        """Return whether the violation is the wanted one."""
        if not str(violation).startswith(self.wanted):
            return False
        self.result.violation = str(violation)
        steps: list[int] = [] if number is None else [number]
        while self.parents[at] >= 0:
            steps.append(self.chosen[at])
            at = self.parents[at]
        self.result.trace = list(self._replay(reversed(steps)))
        return True

    def _replay(self, steps: Iterator[int]) -> Iterator[str]:
        state = self.model.initial()
        for count, number in enumerate(steps, 1):
            w = World(self.model, state)
            act, *words = [*own_moves(w), *faults.moves(w)][number]
            w = World(self.model, state)
            try:
                said = act(w, *words)  # type: ignore[operator]
            except Violation:
                said = None
            else:
                state = w.freeze()
            yield f"{count:3} {self._line(act, words, said)}"

    def _line(self, act: Any, words: list[Any], said: Any) -> str:
        """Return one line of a trace: process, move, attempt, arguments."""
        who, what = name(act).split()
        subject, *rest = words
        if act.__code__.co_varnames[1] == "a":
            subject = self.model.title(subject)
        elif act.__code__.co_varnames[1] == "r":
            subject = f"request {subject}"
        elif act.__code__.co_varnames[1] == "p":
            subject = f"worker {subject}"
        else:
            subject = ""
        more = " ".join(str(x) for x in [*rest, *([said] if isinstance(said, str) else [])])
        return f"{who:8} {what.replace('_', ' '):24} {subject} {more}".rstrip()
