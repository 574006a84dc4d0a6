"""An idle system gets four times its capacity for ten minutes: the scalers of k8s/, simulated.

`prefill` is long prompts with short answers, `decode` short prompts with long answers. With
2, 3 and 6 routers, and with other start times of pods. tests/k8s/test_scaling.py runs it shorter,
with fewer requests.
"""

import json
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import yaml
from autoscaler import Autoscaler
from scaled_cluster import TICK_S, ScaledCluster
from scripted_pods import Machine

COMPONENT = Path(__file__).parents[2] / "k8s/components/autoscaling"
TIMES, IDLE = 4, 0.02  # of the capacity, under load and otherwise
IDLE_S, LOADED_S, AFTER_S = 120.0, 600.0, 1500.0
REVERSAL_S = 600.0
START_S = (10.0, 60.0, 120.0)
LEAST_ROUTERS = 2  # as in k8s/base/control/autoscalers.yaml
SEEDS = {1: LEAST_ROUTERS, 2: 3, 3: 6}  # seeds, with the number of routers


@dataclass(frozen=True)
class Load:
    """Requests of one kind, at a multiple of the capacity of one role's minimum replicas."""

    role: str
    num_tokens: int
    max_tokens: int

    def capacity(self, machine: Machine, least: int) -> float:
        """Requests per second."""
        if self.role == "prefill":
            return least * machine.prompt_tokens_s / self.num_tokens
        streams = machine.kv_tokens / (self.num_tokens + self.max_tokens / 2)
        return least * streams * machine.token_s / self.max_tokens


LOADS = {"prefill": Load("prefill", 640, 16), "decode": Load("decode", 64, 1200)}


def scaled_objects() -> list[dict[str, Any]]:
    """The ScaledObjects of the component."""
    return [yaml.safe_load((COMPONENT / f"{n}.yaml").read_text()) for n in ("prefill", "decode")]


def given(variable: str) -> dict[str, int]:
    """The value that the component sets a variable to, by Deployment."""
    patches = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["patches"]
    found = {}
    for patch in patches:
        pod = yaml.safe_load(patch["patch"])["spec"].get("template", {}).get("spec", {})
        for entry in (e for c in pod.get("containers", []) for e in c["env"]):
            if entry["name"] == variable:
                found[patch["target"]["name"]] = int(entry["value"])
    return found


def run(
    load: Load,
    machine: Machine,
    seed: int,
    loaded_s: float = LOADED_S,
    scaled: list[dict[str, Any]] | None = None,
    num_routers: int = LEAST_ROUTERS,
) -> dict[str, Any]:
    """Figures of one run; `scaled`: other ScaledObjects than the component's. A machine may set
    other limits for waiting requests than the component."""
    scalers = [Autoscaler(one) for one in scaled or scaled_objects()]
    least = {a.target: a.least for a in scalers}
    machine = replace(
        machine,
        waiting=machine.waiting or given("PDSERVE_MAX_WAITING"),
        rows=given("PDSERVE_MAX_RUNNING")["pdserve-decode"],
    )
    cluster = ScaledCluster(scalers, machine, seed, num_routers)
    full = load.capacity(machine, least[f"pdserve-{load.role}"])
    rng, began = Random(seed), time.process_time()
    end, most, backlog = cluster.now + IDLE_S + loaded_s + AFTER_S, dict(cluster.replicas), 0.0
    loaded = cluster.now + IDLE_S
    came = cluster.now
    while cluster.now < end:
        cluster.tick()
        busy = loaded <= cluster.now < loaded + loaded_s
        rate = full * (TIMES if busy else IDLE)
        came = max(came, cluster.now - TICK_S)
        while (gap := rng.expovariate(rate)) + came < cluster.now:
            came += gap
            cluster.ask(load.num_tokens, load.max_tokens)
        at_workers = max(cluster.figures("pdserve_prefill_backlog_seconds"), default=0.0)
        at_routers = sum(cluster.figures("pdserve_router_prefill_wait_seconds"))
        backlog = max(backlog, at_workers + at_routers)
        for name, count in cluster.replicas.items():
            most[name] = max(most[name], count)
    cluster.close()
    waits = sorted(cluster.client.waits)
    return {
        "routers": num_routers,
        "requests": cluster.client.ends.total() + len(cluster.client.arrived),
        "ends": dict(cluster.client.ends),
        "most": most,
        "least": least,
        "last": dict(cluster.replicas),
        "backlog_s": round(backlog, 1),
        "wait_s": {p: round(waits[int(p * (len(waits) - 1))], 1) for p in (0.5, 0.99, 1.0)},
        "first_change_s": round(cluster.history[0][0] - loaded, 1) if cluster.history else None,
        "reversals": most_reversals(cluster.history),
        "longest_drain_s": round(cluster.longest_drain, 1),
        "cut": cluster.num_cut,
        "preempted": cluster.num_preempted,
        "history": [(round(at - loaded), name, count) for at, name, count in cluster.history],
        "cpu_s": round(time.process_time() - began, 1),
    }


def most_reversals(history: list[tuple[float, str, int]]) -> int:
    """The maximum over Deployments of changes in any REVERSAL_S against the direction of the one
    before."""
    worst = 0
    for name in {name for _, name, _ in history}:
        changes = [(at, count) for at, of, count in history if of == name]
        steps = [(at, after - before) for (_, before), (at, after) in pairwise(changes)]
        turns = [at for (_, one), (at, other) in pairwise(steps) if one * other < 0]
        if steps and steps[0][1] < 0:  # the first change of all is an increase
            turns.insert(0, steps[0][0])
        worst = max([worst, *(sum(t <= u < t + REVERSAL_S for u in turns) for t in turns)])
    return worst


def main() -> None:
    found: dict[str, Any] = {}
    for name, load in LOADS.items():
        for seed, num_routers in SEEDS.items():
            found[f"{name} {seed}"] = run(load, Machine(), seed, num_routers=num_routers)
        for start_s in START_S:
            found[f"{name}, pods start in {start_s:g} s"] = run(load, Machine(start_s=start_s), 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
