"""The behaviour of KEDA and the HorizontalPodAutoscaler for a ScaledObject, as documented.

Every SYNC_S the HPA queries each trigger's value and proposes a number of replicas: for a `Value`
the ready ones times the ratio of the value to the threshold, for an `AverageValue` the value
divided by the threshold; a value within TOLERANCE of the threshold changes nothing. The highest
proposal counts. Then the bounds, the stabilization windows and the policies of `behavior` apply. A
trigger without a value prevents scaling down. KEDA itself acts only between none and one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SYNC_S = 15.0
TOLERANCE = 0.1
Ask = Callable[[str], float | None]


@dataclass(frozen=True)
class Trigger:
    """A query, and the share of its value that one worker is to have."""

    name: str
    query: str
    threshold: float
    ratio: bool  # metricType Value


class Autoscaler:
    """One ScaledObject; time is an argument."""

    def __init__(self, scaled: dict[str, Any]) -> None:
        spec = scaled["spec"]
        self.target: str = spec["scaleTargetRef"]["name"]
        self.least: int = spec["minReplicaCount"]
        self.most: int = spec["maxReplicaCount"]
        self.triggers = [
            Trigger(
                t["name"],
                t["metadata"]["query"],
                float(t["metadata"]["threshold"]),
                t["metricType"] == "Value",
            )
            for t in spec["triggers"]
        ]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        self._up, self._down = behavior["scaleUp"], behavior["scaleDown"]
        self._proposals: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []  # replicas added

    def sync(self, ask: Ask, replicas: int, ready: int, now: float) -> int:
        """The number of replicas from now on."""
        proposals, unknown = [], False
        for trigger in self.triggers:
            value = ask(trigger.query)
            if value is None:
                unknown = True
            else:
                proposals.append(self._propose(trigger, value, replicas, ready))
        wanted = max(proposals, default=replicas)
        if unknown:
            wanted = max(wanted, replicas)
        bounded = self._bounded(self._stabilized(wanted, replicas, now), replicas, now)
        chosen = min(self.most, max(self.least, bounded))
        if chosen != replicas:
            self._changes.append((now, chosen - replicas))
        return chosen

    def _propose(self, trigger: Trigger, value: float, replicas: int, ready: int) -> int:
        part = value / trigger.threshold
        ratio = part if trigger.ratio else part / replicas
        if abs(ratio - 1) <= TOLERANCE:
            return replicas
        return math.ceil(part * ready if trigger.ratio else part)

    def _stabilized(self, wanted: int, replicas: int, now: float) -> int:
        """The proposal limited to the range of those in the window."""
        self._proposals.append((now, wanted))
        up, down = (b.get("stabilizationWindowSeconds", 0) for b in (self._up, self._down))
        self._proposals = [p for p in self._proposals if now - p[0] <= max(up, down)]
        least = min(n for at, n in self._proposals if now - at <= up)
        most = max(n for at, n in self._proposals if now - at <= down)
        return min(max(replicas, least), most)

    def _bounded(self, wanted: int, replicas: int, now: float) -> int:
        """The proposal limited by the policies, the most generous of each direction."""
        if wanted > replicas:
            return min(wanted, max(self._reach(p, replicas, 1, now) for p in self._up["policies"]))
        if wanted < replicas:
            return max(
                wanted, min(self._reach(p, replicas, -1, now) for p in self._down["policies"])
            )
        return wanted

    def _reach(self, policy: dict[str, Any], replicas: int, sign: int, now: float) -> int:
        recent = [n for at, n in self._changes if now - at < policy["periodSeconds"]]
        before = replicas - sum(n for n in recent if n * sign > 0)  # when the period began
        if policy["type"] == "Pods":
            return before + sign * int(policy["value"])
        share = before * (1 + sign * policy["value"] / 100)
        return math.ceil(share) if sign > 0 else math.floor(share)
