"""The scalers of k8s/ in the simulation of `make bench-scaling`, shortened; and parts of that
simulation."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import scaling
from autoscaler import Autoscaler
from prometheus_client.core import GaugeMetricFamily
from scaled_cluster import ScaledCluster
from scraped import Scraped
from scripted_pods import Machine

BRIEF = {"prefill": (Machine(), 150.0), "decode": (Machine(kv_tokens=8192), scaling.LOADED_S)}
MOST_BACKLOG_S = 30.0
MOST_UNSERVED = 0.005  # share of the requests that were refused or waited too long


def broken(load: scaling.Load, found: dict[str, Any]) -> list[str]:
    """Return the requirements that a run violates."""
    mine, other = f"pdserve-{load.role}", "pdserve-decode"
    other = other if load.role == "prefill" else "pdserve-prefill"
    unserved = found["ends"].get("late", 0) + found["ends"].get("refused", 0)
    rules = {
        "scales": found["most"][mine] >= scaling.TIMES * found["least"][mine],
        "alone": found["most"][other] == found["least"][other],
        "keeps the backlog": found["backlog_s"] < MOST_BACKLOG_S,
        "keeps the wait": found["wait_s"][0.99] < MOST_BACKLOG_S,
        "comes back": found["last"] == found["least"],
        "serves nearly all": unserved <= MOST_UNSERVED * found["requests"],
        "no stream breaks": not found["ends"].get("broken") and not found["cut"],
        "one reversal": found["reversals"] <= 1,
    }
    return [name for name, holds in rules.items() if not holds]


@pytest.mark.extended
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_scalers_follow_a_load_of_four_times_the_capacity(role: str) -> None:
    machine, loaded_s = BRIEF[role]
    found = scaling.run(scaling.LOADS[role], machine, 1, loaded_s)
    assert broken(scaling.LOADS[role], found) == [], found
    assert found["ends"]["ok"] > 500


@pytest.mark.extended
def test_a_flapping_scaler_and_an_idle_one_are_found() -> None:
    changed = deepcopy(scaling.scaled_objects())
    for scaled in changed:
        behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        behavior["scaleDown"]["stabilizationWindowSeconds"] = 0
        del scaled["spec"]["triggers"][1]
    machine = replace(Machine(), prompt_tokens_s=1280.0)
    found = scaling.run(scaling.LOADS["prefill"], machine, 1, 300.0, changed)
    assert {"one reversal", "keeps the backlog"} <= set(broken(scaling.LOADS["prefill"], found))


@pytest.mark.extended
def test_requests_that_are_not_served_are_found() -> None:
    """Pods start too late for the waiting requests, so the routers' queues time out."""
    load, none = scaling.LOADS["decode"], {"pdserve-prefill": 0, "pdserve-decode": 0}
    machine = Machine(kv_tokens=4096, start_s=120.0, waiting=none)
    found = scaling.run(load, machine, 1, 120.0)
    assert found["ends"]["late"] > MOST_UNSERVED * found["requests"]
    assert "serves nearly all" in broken(load, found)
    for refused, holds in ((2, True), (3, False)):
        ends = {"ok": 990, "late": 3, "refused": refused}
        judged = broken(load, found | {"requests": 1000, "ends": ends})
        assert ("serves nearly all" not in judged) is holds


def trigger(role: str, name: str) -> str:
    """Return the query of a trigger in the component."""
    (scaled,) = [s for s in scaling.scaled_objects() if s["metadata"]["name"] == f"pdserve-{role}"]
    (query,) = [t["metadata"]["query"] for t in scaled["spec"]["triggers"] if t["name"] == name]
    return str(query)


def test_the_backlog_covers_all_routers() -> None:
    """Each router knows the workers' queues and only the requests that wait in that router."""
    none = {"pdserve-prefill": 0, "pdserve-decode": 0}
    machine = Machine(prompt_tokens_s=64.0, kv_tokens=1024, waiting=none)
    cluster = ScaledCluster([Autoscaler(s) for s in scaling.scaled_objects()], machine, 1, 3)
    try:
        for _ in range(40):
            cluster.ask(640, 16)
        while not cluster.figures("pdserve_router_prefill_wait_seconds"):
            cluster.tick()
        tokens = [
            sum(map(r.dispatcher.placer.remote_tokens, r.dispatcher.placer.waiting))
            for r in cluster.routers
        ]
        assert min(tokens) > 0, "a router has no waiting request"
        at_workers = sum(p.load(machine).waiting_tokens for p in cluster.of("pdserve-prefill"))
        targets = [(f"pdserve-router-{n}", m.collect()) for n, m in enumerate(cluster.metrics)]
        scraped = Scraped()
        scraped.seen(targets, cluster.now)
        backlog_s = scraped.ask(trigger("prefill", "backlog"), cluster.now)
        assert backlog_s == pytest.approx((at_workers + sum(tokens)) / 64)
    finally:
        cluster.close()


def test_decode_rows_are_known_without_prefill_workers() -> None:
    """Without decode workers the query has no result, which must not count as idle."""
    query = trigger("decode", "rows")

    def answer(*roles: str) -> float | None:
        families = [
            GaugeMetricFamily(f"vllm:num_requests_{name}", "", value=value)
            for name, value in (("running", 7.0), ("waiting", 2.0))
        ]
        scraped = Scraped()
        scraped.seen([(f"pdserve-{role}-1", families) for role in roles], 0.0)
        return scraped.ask(query, 0.0)

    assert answer("decode") == 9
    assert answer("decode", "prefill") == 0
    assert answer("prefill") is None


def scaler(**behavior: Any) -> Autoscaler:
    """Return a scaler from 1 to 100 replicas with one trigger of kind Value and one of kind
    AverageValue."""
    sides = {"scaleUp": {"policies": [{"type": "Pods", "value": 99, "periodSeconds": 15}]}}
    sides["scaleDown"] = sides["scaleUp"]
    return Autoscaler(
        {
            "spec": {
                "scaleTargetRef": {"name": "x"},
                "minReplicaCount": 1,
                "maxReplicaCount": 100,
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {**sides, **behavior}}},
                "triggers": [
                    {
                        "name": name,
                        "metricType": kind,
                        "metadata": {"query": name, "threshold": "10"},
                    }
                    for name, kind in (("ratio", "Value"), ("sum", "AverageValue"))
                ],
            }
        }
    )


def synced(
    made: Autoscaler, ratio: float | None, sum_: float | None, now: float, **pods: int
) -> int:
    found = {"ratio": ratio, "sum": sum_}
    return made.sync(found.__getitem__, pods["replicas"], pods.get("ready", pods["replicas"]), now)


def test_proposed_replicas(subtests: pytest.Subtests) -> None:
    for ratio, sum_, replicas, ready, wanted in (
        (25, 0, 4, 4, 10),  # 2.5 times the existing replicas
        (25, 0, 4, 2, 5),  # 2.5 times the ready replicas
        (0, 45, 4, 4, 5),  # 10 for each of 5 replicas
        (25, 45, 4, 4, 10),  # the higher proposal
        (10.9, 0, 4, 4, 4),  # within the tolerance
        (0, 43, 4, 4, 4),
        (0, 0, 4, 4, 1),  # the minimum
        (2000, 0, 4, 4, 100),
        (None, 0, 4, 4, 4),  # an unknown metric prevents scaling down
        (None, 45, 4, 4, 5),  # but not scaling up
    ):
        with subtests.test(ratio=ratio, sum_=sum_, replicas=replicas, ready=ready, wanted=wanted):
            assert synced(scaler(), ratio, sum_, 0.0, replicas=replicas, ready=ready) == wanted


def test_stabilization_windows_and_policies() -> None:
    half, twice = (
        {"policies": [{"type": "Percent", "value": percent, "periodSeconds": 30}]}
        for percent in (50, 100)
    )
    made = scaler(scaleUp=twice, scaleDown={"stabilizationWindowSeconds": 60, **half})
    assert synced(made, 0, 80, 0, replicas=2) == 4, "at most doubles in 30 s"
    assert synced(made, 0, 80, 15, replicas=4) == 4
    assert synced(made, 0, 80, 30, replicas=4) == 8
    assert synced(made, 0, 10, 45, replicas=8) == 8, "the proposal a minute ago was 8"
    assert synced(made, 0, 10, 91, replicas=8) == 4, "at most halves in 30 s"
    assert synced(made, 0, 10, 106, replicas=4) == 4
    assert synced(made, 0, 10, 121, replicas=4) == 2


def gauge(value: float, **labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily("rows", "", labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def test_queries() -> None:
    scraped = Scraped()
    for step, (one, other) in enumerate([(0, 3), (2, 4), (2, 0)]):
        targets = [("a-1", [gauge(one, model="m")]), ("b-1", [gauge(other, model="n")])]
        scraped.seen(targets, 15.0 * step)
    now = 30.0
    assert scraped.ask("sum(rows)", now) == 2
    assert scraped.ask("max(rows)", 15.0) == 4
    assert scraped.ask('sum(rows{pod=~"a-.*"}) - sum(rows{model!="m"})', now) == 2
    assert scraped.ask("sum(nothing)", now) is scraped.ask("sum(nothing) + sum(rows)", now) is None
    assert scraped.ask("sum(rows) * (max(rows) > bool 1)", now) == 2
    assert scraped.ask("sum(rows) * (max(rows) > bool 2)", now) == 0
    assert scraped.ask("sum(rows) - (sum(nothing) or vector(3))", now) == -1
    assert scraped.ask("sum(nothing) or vector(3)", now) == 3
    assert scraped.ask("sum(rows) or vector(3)", now) == 2
    busy = "sum(avg_over_time((rows > bool 0)[45s:15s]))"
    assert scraped.ask(busy, now) == pytest.approx(4 / 3)
    scraped.seen([("b-1", [gauge(1, model="n")])], 45.0)
    assert scraped.ask("sum(rows)", 45.0) == 1, "a series ends with its target"
    assert scraped.ask("sum(rows)", 400.0) is None
    with pytest.raises(ValueError, match="is not known"):
        scraped.ask("rate(rows[1m])", now)


def test_reversals(subtests: pytest.Subtests) -> None:
    for counts, turns in (
        ([2, 4, 8, 4, 1], 1),
        ([2, 4, 2, 4, 2], 3),
        ([2, 4, 8], 0),
    ):
        with subtests.test(counts=counts, turns=turns):
            history = [(60.0 * n, "x", count) for n, count in enumerate(counts)]
            assert scaling.most_reversals(history) == turns
