"""Simulate one cell of the fault matrix with one seed.

    python -m simulation.run --seed 7 --cell "SIGKILL decode" decoding
    python -m simulation.run --scenario FILE

(with PYTHONPATH=tests). Prints the result as JSON; the exit code is 1 if the oracle finds a
violation.
"""

import argparse
import json
import math
import sys
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from simulation import oracle
from simulation.clock import Process, World
from simulation.cluster import Cluster, Reply
from simulation.faults import Faults
from simulation.network import Message, Network
from simulation.phases import PhaseWatch
from simulation.scenario import TARGET, Scenario, draw
from simulation.seams import LoopEngineThread, entered

LIMIT_S = 200.0  # after this time an unanswered request counts as stuck
TICK_S = 0.1
DRAWS = 60


@dataclass(frozen=True)
class Result:
    """Result of one run. `digest` covers every message and its time."""

    violations: list[str]
    hits: list[tuple[str, str]]  # (fault, phase)
    digest: int
    simulated_s: float
    callbacks: int
    answers: dict[str, str]  # terminal answer by request
    retries: int
    computed: int  # prompt tokens computed by all workers
    placed_again: int  # followers


class Run:
    """A scenario in progress; `finish` runs it to its end."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.network = Network(self.world)
        self.times: dict[tuple[str, str, int], float] = {}  # times of phase events
        self._digest = 0
        self.watch = PhaseWatch(self._on_phase)

    def finish(self) -> Result:
        """Run to the end and return the result. Errors of the services become violations."""
        world = self.world
        with entered(world, self.network, self.scenario.seed):
            LoopEngineThread.watch = self._on_plan
            self.cluster = cluster = Cluster(world, self.network, self.scenario)
            self.faults = Faults(cluster, self.watch)
            self.network.watchers += [self._note, self.watch.on_message, self.faults.on_message]
            try:
                cluster.start()
                began = world.now
                cluster.ask_all()
                self._waiting = list(cluster.replies.values())
                world.run(self._answered, began + LIMIT_S)
                self._rest()
                found = oracle.violations(cluster, self.faults)
            finally:
                self.network.closed = True
                world.close()
        return Result(
            violations=found,
            hits=[(s.fault.kind, s.phase) for s in self.faults.strikes if s.hit],
            digest=self._digest,
            simulated_s=round(world.now - began, 3),
            callbacks=world.num_callbacks,
            answers={r.ask.name: _answer(r) for r in cluster.replies.values()},
            retries=sum(
                node.process.service.core.dispatcher.num_retries
                for node in cluster.of("router")
                if node.process.service is not None
            ),
            computed=sum(
                times
                for (name, position), times in self.watch.computed.items()
                if name and position < len(self.scenario.ask(name).prompt)
            ),
            placed_again=self.watch.placed_again.total(),
        )

    def _answered(self) -> bool:
        """Return whether every reply is over. Called after every callback; a reply that is over
        stays over."""
        while self._waiting and self._waiting[-1].over:
            self._waiting.pop()
        return not self._waiting

    def _rest(self) -> None:
        """Run until the faults are over and nothing is held, or until the time bound."""
        world = self.world
        for strike in self.faults.strikes:
            reply = self.cluster.replies.get(strike.fault.request)
            if strike.fault.kind == "deadline" and reply is not None:
                strike.hit = reply.terminal == ["DEADLINE_EXCEEDED"]
                strike.phase = self.watch.failed_in.get(strike.fault.request, "")
        end = max(world.now, self.faults.calm_at) + oracle.BOUND_S
        while world.now < end and not world.errors:  # errors are violations
            world.run(lambda: False, world.now + TICK_S)
            end = max(end, self.faults.calm_at + oracle.BOUND_S)
            if world.now >= self.faults.calm_at and oracle.at_rest(self.cluster):
                return

    def _on_phase(self, request: str, phase: str, index: int, message: Message | None) -> None:
        self.times.setdefault((request, phase, index), self.world.now)
        self.faults.on_phase(request, phase, index, message)

    def _on_plan(self, process: Process, plan: object) -> None:
        self.watch.on_plan(process, plan)

    def _note(self, message: Message) -> None:
        text = f"{self.world.now} {message.src.name} {message.dst.name} {type(message.body)}"
        self._digest = zlib.crc32(text.encode(), self._digest)


def _answer(reply: Reply) -> str:
    if reply.left or reply.broken:
        return "left" if reply.left else "gateway died"
    return reply.terminal[0] if reply.terminal else "none"


def simulate(scenario: Scenario) -> Result:
    """Simulate a scenario and return its result."""
    return Run(scenario).finish()


def make(seed: int, kind: str, phase: str) -> Scenario:
    """Return the scenario of a seed and a cell. A deadline is set to a time at which a run without
    it is in the given phase. Some phases are mostly shorter than the milliseconds in which
    deadlines are sent: up to `DRAWS` scenarios are tried, of the seeds `seed + number * 2**40`."""
    if kind != "deadline":
        return draw(seed, kind, phase)
    for number in range(DRAWS):
        scenario = _with_deadline(draw(seed + (number << 40), kind, phase), phase)
        result = simulate(scenario)
        if result.violations or (kind, phase) in result.hits:
            break
    return scenario


def _with_deadline(scenario: Scenario, phase: str) -> Scenario:
    dry = Run(scenario.without_faults())
    dry.finish()
    reached = dry.times.get((TARGET, phase, scenario.faults[0].index))
    if reached is None:
        return scenario
    timeout_s = math.ceil((reached - dry.cluster.replies[TARGET].requested_at) * 1000) / 1000
    asks = (replace(a, timeout_s=timeout_s) if a.name == TARGET else a for a in scenario.asks)
    return replace(scenario, asks=tuple(asks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cell", nargs=2, metavar=("FAULT", "PHASE"), default=("none", "admitted"))
    parser.add_argument("--scenario", type=Path, help="a scenario's JSON instead of a seed")
    parser.add_argument("--show", action="store_true", help="print the scenario, too")
    args = parser.parse_args()
    if args.scenario is not None:
        scenario = Scenario.from_json(args.scenario.read_text())
    elif args.cell[0] == "none":
        scenario = draw(args.seed, *args.cell).without_faults()
    else:
        scenario = make(args.seed, *args.cell)
    if args.show:
        print(scenario.to_json())
    result = simulate(scenario)
    print(json.dumps(asdict(result)))
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
