"""Rules for each rendered kustomization under k8s/; a rule gives a sentence for each breach."""

from collections.abc import Callable, Iterator

from builders.manifests import Manifest

from oracles.manifest_rules import pods, scaling, traffic

Rule = Callable[[list[Manifest]], Iterator[str]]

ALWAYS: tuple[Rule, ...] = (
    pods.probes,
    pods.spread,
    pods.drain,
    pods.sizes,
    pods.models,
    pods.rights,
    pods.variables,
    scaling.scalers,
    scaling.metrics,
    scaling.budgets,
    traffic.own_selectors,
    traffic.egress,
    traffic.entrance,
    traffic.certificates,
)
RELEASED: tuple[Rule, ...] = (*ALWAYS, pods.digests)
