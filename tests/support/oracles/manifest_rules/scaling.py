"""Rules about numbers of pods: scalers, their metrics, and how many pods end at once."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import metrics_page
import promql_parser
from builders.manifests import Manifest, of_kind, selects, workloads

SCALERS = ("ScaledObject", "HorizontalPodAutoscaler")
# Fields of KEDA's scaler `prometheus`; its schema accepts any.
NEEDED = {"serverAddress", "query", "threshold"}
WORDS = NEEDED | {"activationThreshold", "namespace", "authModes", "ignoreNullValues"}
SAMPLE = re.compile(r"_(total|bucket|sum|count)$")


def scalers(manifests: list[Manifest]) -> Iterator[str]:
    """A scaler's target exists, has no fixed number of replicas, and scales down slowly."""
    targets = {(w.kind, w.name.partition(" ")[0]): w for w in workloads(manifests)}
    scaled: set[tuple[str, str]] = set()
    for name, scaler in of_kind(manifests, *SCALERS).items():
        target = scaler["spec"]["scaleTargetRef"]
        key = (target.get("kind", "Deployment"), target["name"])
        if key in scaled:
            yield f"two scalers of {key[1]}"
        scaled.add(key)
        workload = targets.get(key)
        if workload is None:
            yield f"{name} scales {key[1]}, which is not there"
        elif "replicas" in workload.manifest["spec"]:
            yield f"{key[1]} is scaled and has a fixed number of replicas"
        down = _behavior(scaler).get("scaleDown", {})
        if down.get("stabilizationWindowSeconds", 0) < 600 or not down.get("policies"):
            yield f"{name} goes down at once"
        low, high = limits_of(scaler)
        if not 1 <= low < high:
            yield f"{name} has no room"
    for key, workload in targets.items():
        if (
            key[0] == "Deployment"
            and key not in scaled
            and "replicas" not in workload.manifest["spec"]
        ):
            yield f"nothing says how many there are of {key[1]}"


def _behavior(scaler: Manifest) -> Manifest:
    spec: Manifest = scaler["spec"]
    if scaler["kind"] == "ScaledObject":
        spec = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
    found: Manifest = spec.get("behavior", {})
    return found


def limits_of(scaler: Manifest) -> tuple[int, int]:
    """Return the least and the most replicas."""
    spec, keda = scaler["spec"], scaler["kind"] == "ScaledObject"
    words = ("minReplicaCount", "maxReplicaCount") if keda else ("minReplicas", "maxReplicas")
    low, high = (spec.get(word, 0) for word in words)
    return low, high


emitted = cache(metrics_page.names)


def metrics(manifests: list[Manifest]) -> Iterator[str]:
    """A scaler queries metrics that pdserve emits, of pods that exist, in fields that
    KEDA knows.
    """
    known = emitted()
    pods = [w.name for w in workloads(manifests)]
    for name, scaler in of_kind(manifests, "ScaledObject").items():
        for trigger in scaler["spec"]["triggers"]:
            what = f"trigger {trigger.get('name')} of {name}"
            if trigger["type"] != "prometheus":
                yield f"{what} is of another type"
                continue
            request = trigger["metadata"]
            if unknown := request.keys() - WORDS:
                yield f"{what} has unknown words: {', '.join(sorted(unknown))}"
            if missing := NEEDED - request.keys():
                yield f"{what} lacks {', '.join(sorted(missing))}"
                continue
            if request.get("ignoreNullValues") != "false":
                yield f"{what} takes a Prometheus without figures for idleness"
            if trigger.get("metricType") not in ("Value", "AverageValue"):
                yield f"{what} does not say whether it is a ratio or a sum"
            try:
                found = list(selectors(promql_parser.parse(request["query"])))
            except ValueError as error:
                yield f"{what} is no query: {error}"
                continue
            for metric, pod in found:
                if not {metric, SAMPLE.sub("", metric)} & known:
                    yield f"{what} asks for {metric}, which no process emits"
                if pod and not any(re.fullmatch(pod, f"{p}-0") for p in pods):
                    yield f"{what} asks for pods {pod}, which no workload has"


def selectors(query: Any) -> Iterator[tuple[str, str]]:
    """Return (metric, matchers of its label `pod`) of each vector selector in a query."""
    if isinstance(query, promql_parser.VectorSelector):
        pod = [m.value for m in query.matchers.matchers if m.name == "pod"]
        yield query.name, pod[0] if pod else ""
        return
    for part in ("expr", "lhs", "rhs", "vector_selector"):
        if (inner := getattr(query, part, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(query, "args", []):
        yield from selectors(inner)


def budgets(manifests: list[Manifest]) -> Iterator[str]:
    """A drained node takes one pod of a role at a time."""
    found = of_kind(manifests, "PodDisruptionBudget").values()
    for workload in workloads(manifests):
        if workload.ends:
            continue
        mine = [b["spec"] for b in found if selects(b["spec"]["selector"], workload.labels)]
        if [b.get("maxUnavailable") for b in mine] != [1]:
            yield f"{workload.name} has {len(mine)} budgets of one pod"  # two would block a drain
