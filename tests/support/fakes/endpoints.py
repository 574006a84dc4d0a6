"""Pods of one Service as Kubernetes spreads them over EndpointSlices, changed at random.

The true state is kept here, by pods; the slices go to a FakeKubernetes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from fakes.kubernetes import FakeKubernetes, Object, endpoint_slice

PORT = 50050
SLICE_SIZE = 4


@dataclass
class Pod:
    uid: str
    host: str
    ipv6: str = ""
    ready: bool = False
    terminating: bool = False
    slices: set[str] = field(default_factory=set)

    def endpoint(self, family: str) -> Object:
        return {
            "addresses": [self.ipv6 if family == "IPv6" else self.host],
            "conditions": {
                "ready": self.ready and not self.terminating,
                "serving": self.ready,
                "terminating": self.terminating,
            },
            "targetRef": {"kind": "Pod", "uid": self.uid},
        }


class FakeEndpoints:
    """The Service `name`; each change is sent to the API server at once."""

    def __init__(
        self, api: FakeKubernetes, rng: Random, name: str = "router", port: int = PORT
    ) -> None:
        self._api = api
        self._port = port
        self._rng = rng
        self._name = name
        self._numbers = count()
        self._families: dict[str, str] = {}  # of slices
        self.pods: dict[str, Pod] = {}

    def addresses(self, ready_only: bool) -> list[str]:
        """Return the true addresses."""
        pods = [p for p in self.pods.values() if not ready_only or (p.ready and not p.terminating)]
        return sorted(f"{pod.host}:{self._port}" for pod in pods)

    # --- single changes

    def add(self, host: str, ready: bool = False, ipv6: str = "") -> Pod:
        pod = Pod(f"uid-{next(self._numbers)}", host, ipv6, ready)
        self.pods[pod.uid] = pod
        for family in ("IPv4", "IPv6") if ipv6 else ("IPv4",):
            self._into(pod, self._room(family))
        return pod

    def set(self, pod: Pod, ready: bool, terminating: bool = False) -> None:
        pod.ready, pod.terminating = ready, terminating
        self._tell(*pod.slices)

    def remove(self, pod: Pod) -> None:
        del self.pods[pod.uid]
        self._tell(*pod.slices)

    # --- changes at random

    def change(self) -> None:
        """Make one change of any kind that is possible now."""
        changes: list[Callable[[], None]] = [self._add_any, self._stranger]
        if self.pods:
            changes += [self._flip, self._flip, self._terminate, self._remove_any, self._move]
            changes += [self._duplicate, self._replace_slice]
        self._rng.choice(changes)()

    def _any(self) -> Pod:
        return self._rng.choice(list(self.pods.values()))

    def _add_any(self) -> None:
        used = {pod.host for pod in self.pods.values()}
        free = [f"10.1.0.{n}" for n in range(1, 31) if f"10.1.0.{n}" not in used]
        if not free:
            self._remove_any()
            return
        host = self._rng.choice(free)
        both = self._rng.random() < 0.3
        self.add(host, self._rng.random() < 0.5, f"fd00::{host[7:]}" if both else "")

    def _flip(self) -> None:
        pod = self._any()
        self.set(pod, not pod.ready, pod.terminating)

    def _terminate(self) -> None:
        pod = self._any()
        self.set(pod, pod.ready, terminating=True)

    def _remove_any(self) -> None:
        self.remove(self._any())

    def _move(self) -> None:
        """Move an endpoint to another slice; for a while it is in both, or in none."""
        pod = self._any()
        old = self._rng.choice(sorted(pod.slices))
        new = self._new_slice(self._families[old])
        steps: list[Callable[[], None]] = [
            lambda: self._into(pod, new),
            lambda: self._out_of(pod, old),
        ]
        self._rng.shuffle(steps)
        for step in steps:
            step()

    def _duplicate(self) -> None:
        pod = self._any()
        self._into(pod, self._room("IPv4"))

    def _replace_slice(self) -> None:
        """Let another slice take all endpoints of one, before or after it is deleted."""
        old = self._rng.choice(sorted({name for pod in self.pods.values() for name in pod.slices}))
        pods = [pod for pod in self.pods.values() if old in pod.slices]
        for pod in pods:
            pod.slices.discard(old)
        if early := self._rng.random() < 0.5:
            self._delete(old)
        new = self._new_slice(self._families[old])
        for pod in pods:
            pod.slices.add(new)
        self._tell(new)
        if not early:
            self._delete(old)

    def _stranger(self) -> None:
        """Add a slice that is irrelevant: of another Service, namespace or port."""
        pod = Pod("stranger", "10.9.9.9", ready=True)
        is_own = self._rng.random() < 0.3
        metrics = [{"name": "metrics", "port": 9090, "protocol": "TCP"}]
        self._api.put(
            endpoint_slice(
                f"other-{self._rng.randrange(3)}-{is_own}",
                self._name if is_own else "other",
                [pod.endpoint("IPv4")],
                metrics if is_own else None,
            )
        )
        self._api.put(
            endpoint_slice("far", self._name, [pod.endpoint("IPv4")], namespace="elsewhere")
        )

    # --- slices

    def _room(self, family: str) -> str:
        """Return a slice that is not full."""
        for name, of in self._families.items():
            if of == family and sum(name in p.slices for p in self.pods.values()) < SLICE_SIZE:
                return name
        return self._new_slice(family)

    def _new_slice(self, family: str) -> str:
        name = f"{self._name}-{next(self._numbers)}"
        self._families[name] = family
        return name

    def _into(self, pod: Pod, name: str) -> None:
        pod.slices.add(name)
        self._tell(name)

    def _out_of(self, pod: Pod, name: str) -> None:
        pod.slices.discard(name)
        self._tell(name)

    def _delete(self, name: str) -> None:
        self._api.delete(name)

    def _tell(self, *names: str) -> None:
        for name in sorted(names):
            family = self._families[name]
            of_it = [p.endpoint(family) for p in self.pods.values() if name in p.slices]
            ports = [{"name": "grpc", "port": self._port, "protocol": "TCP"}]
            self._api.put(endpoint_slice(name, self._name, of_it, ports, family))
