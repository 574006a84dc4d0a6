"""Every kustomization under k8s/ keeps the rules, and each rule reports a breach."""

from collections.abc import Callable
from typing import Any

import pytest
from builders.manifests import PINNED, TOGETHER, Manifest, kustomizations, of_kind, rendered
from oracles.manifest_rules import ALWAYS, RELEASED, Rule, pods, scaling, traffic


def test_all_kustomizations_are_found() -> None:
    names = set(kustomizations())
    assert {"base", "observability"} <= names
    overlays = {"cpu", "gpu", "racks", "release", "two-pools"}
    assert {f"overlays/{overlay}" for overlay in overlays} <= names
    components = {"autoscaling", "endpoint-slices", "gateway-api", "inference-gateway"}
    assert {f"components/{component}" for component in components} <= names


@pytest.mark.parametrize("names", TOGETHER, ids=len)
def test_combined_components_keep_the_rules(
    subtests: pytest.Subtests, names: tuple[str, ...]
) -> None:
    manifests = rendered(*names)
    for rule in ALWAYS:
        with subtests.test(rule.__name__):
            assert list(rule(manifests)) == []


@pytest.mark.parametrize("name", kustomizations())
def test_each_kustomization_keeps_the_rules(subtests: pytest.Subtests, name: str) -> None:
    manifests = rendered(name)
    for rule in RELEASED if name in PINNED else ALWAYS:
        with subtests.test(rule.__name__):
            assert list(rule(manifests)) == []


def remove(path: str) -> Callable[[Any], None]:
    """Return a change that removes the field at a path of keys and indices, separated by `|`."""

    def change(value: Any) -> None:
        *way, last = [int(key) if key.isdigit() else key for key in path.split("|")]
        for key in way:
            value = value[key]
        del value[last]

    return change


def put(path: str, new: Any) -> Callable[[Any], None]:
    """Return a change that sets the field at such a path to a value."""

    def change(value: Any) -> None:
        *way, last = [int(key) if key.isdigit() else key for key in path.split("|")]
        for key in way:
            value = value[key]
        value[last] = new

    return change


POD = "spec|template|spec"
ONLY = f"{POD}|containers|0"
RELEASE = "overlays/release"
COMPONENT = "app.kubernetes.io/component"
ANYWHERE = {"ports": [{"port": 443}]}
INTERNET = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443}]}
QUERY = "spec|triggers|0|metadata|query"
DOWN = "spec|advanced|horizontalPodAutoscalerConfig|behavior|scaleDown"
# Rule; changed object (in the overlay `release` unless another is named); the change; part of the
# rule's message.
BREACHES: list[tuple[Rule, str, Callable[[Any], None], str]] = [
    (pods.probes, "Deployment gateway", remove(f"{ONLY}|readinessProbe"), "no r"),
    (pods.probes, "Deployment decode", put(f"{ONLY}|startupProbe|grpc|port", 1), "port"),
    (pods.spread, "Deployment router", remove(f"{POD}|topologySpreadConstraints|0"), "spread"),
    (
        pods.spread,
        "Deployment router",
        remove(f"{POD}|topologySpreadConstraints|1|matchLabelKeys"),
        "spread",
    ),
    (pods.spread, "Deployment prefill", remove(f"{POD}|affinity"), "avoid"),
    (pods.spread, "racks: LeaderWorkerSet workers", remove("metadata|annotations"), "topology"),
    (pods.drain, "Deployment decode", put(f"{POD}|terminationGracePeriodSeconds", 620), "killed"),
    (pods.drain, "Deployment decode", remove(f"{POD}|terminationGracePeriodSeconds"), "killed"),
    (pods.drain, "Deployment prefill", put(f"{ONLY}|lifecycle", {}), "preStop"),
    (scaling.scalers, "Deployment prefill", put("spec|replicas", 2), "fixed"),
    (scaling.scalers, "Deployment gateway", put("spec|replicas", 2), "fixed"),
    (
        scaling.scalers,
        "ScaledObject decode",
        put("spec|scaleTargetRef|name", "decode"),
        "not there",
    ),
    (
        scaling.scalers,
        "ScaledObject decode",
        put("spec|scaleTargetRef|name", "pdserve-router"),
        "two",
    ),
    (
        scaling.scalers,
        "ScaledObject decode",
        put(f"{DOWN}|stabilizationWindowSeconds", 0),
        "at once",
    ),
    (
        scaling.scalers,
        "HorizontalPodAutoscaler router",
        remove("spec|behavior|scaleDown"),
        "at once",
    ),
    (scaling.scalers, "HorizontalPodAutoscaler router", put("spec|maxReplicas", 2), "room"),
    (
        scaling.metrics,
        "ScaledObject prefill",
        put(QUERY, "max(pdserve_backlog)"),
        "no process emits",
    ),
    (scaling.metrics, "ScaledObject prefill", put(QUERY, "max(pdserve_router_queued"), "no query"),
    (
        scaling.metrics,
        "ScaledObject prefill",
        put(QUERY, 'sum(vllm:num_requests_running{pod=~"prefill.*"})'),
        "no workload has",
    ),
    (scaling.metrics, "ScaledObject prefill", remove("spec|triggers|0|metricType"), "ratio"),
    (
        scaling.metrics,
        "ScaledObject prefill",
        put("spec|triggers|0|metadata|treshold", "4"),
        "unknown",
    ),
    (
        scaling.metrics,
        "ScaledObject prefill",
        remove("spec|triggers|0|metadata|threshold"),
        "lacks",
    ),
    (
        scaling.metrics,
        "ScaledObject prefill",
        remove("spec|triggers|0|metadata|ignoreNullValues"),
        "idleness",
    ),
    (scaling.metrics, "ScaledObject prefill", put("spec|triggers|0|type", "cpu"), "type"),
    (pods.sizes, "Deployment router", remove(f"{ONLY}|resources|limits|memory"), "limit"),
    (
        pods.sizes,
        "Deployment router",
        remove(f"{ONLY}|resources|requests|ephemeral-storage"),
        "asks",
    ),
    (pods.sizes, "Deployment decode", remove(f"{POD}|initContainers|0|resources"), "limit"),
    (pods.sizes, "Job model", put(f"{POD}|volumes|2|emptyDir", {}), "volume tmp"),
    (
        traffic.own_selectors,
        "Deployment decode",
        remove("spec|selector|matchLabels|pdserve.internal/pool"),
        "without",
    ),
    (
        traffic.own_selectors,
        "Deployment decode",
        remove(f"spec|selector|matchLabels|{COMPONENT}"),
        "selects",
    ),
    (
        traffic.own_selectors,
        "Service router",
        put("spec|selector", {"app.kubernetes.io/name": "router"}),
        "of others",
    ),
    (
        traffic.own_selectors,
        "PodDisruptionBudget router",
        put(f"spec|selector|matchLabels|{COMPONENT}", "x"),
        "nothing",
    ),
    (traffic.own_selectors, "NetworkPolicy decode", put("spec|podSelector", {}), "of others"),
    (traffic.own_selectors, "Service gateway", put("metadata|name", "gateway"), "another's"),
    (
        traffic.egress,
        "NetworkPolicy nothing-else",
        put("spec|policyTypes", ["Ingress"]),
        "Egress is open",
    ),
    (traffic.egress, "NetworkPolicy dns", put("spec|egress", []), "DNS"),
    (traffic.egress, "NetworkPolicy decode", put("spec|egress|0", INTERNET), "internet"),
    (traffic.egress, "NetworkPolicy decode", put("spec|egress|0", ANYWHERE), "anywhere"),
    (traffic.egress, "NetworkPolicy model", remove("spec|egress|0|to|0|ipBlock|except"), "private"),
    (
        traffic.egress,
        "NetworkPolicy decode",
        put("spec|egress|1|ports|0|port", "kw"),
        "no workload has",
    ),
    (scaling.budgets, "PodDisruptionBudget gateway", put("spec|maxUnavailable", 2), "budget"),
    (
        scaling.budgets,
        "PodDisruptionBudget gateway",
        put(f"spec|selector|matchLabels|{COMPONENT}", "x"),
        "budget",
    ),
    (
        pods.models,
        "Deployment decode",
        put(f"{POD}|volumes|0|persistentVolumeClaim|readOnly", False),
        "for writing",
    ),
    (pods.models, "Deployment decode", remove(f"{ONLY}|volumeMounts|0|readOnly"), "change"),
    (pods.models, "Deployment decode", remove(f"{POD}|initContainers"), "half a model"),
    (
        pods.models,
        "cpu: Deployment decode",
        put(f"{ONLY}|env", [{"name": "PDSERVE_MODEL", "value": "org/x"}]),
        "fetch",
    ),
    (pods.rights, "Deployment decode", remove(f"{POD}|securityContext|runAsNonRoot"), "root"),
    (pods.rights, "Deployment decode", remove(f"{POD}|securityContext|seccompProfile"), "kernel"),
    (pods.rights, "Deployment decode", remove(f"{POD}|automountServiceAccountToken"), "token"),
    (pods.rights, "Deployment decode", remove(f"{POD}|enableServiceLinks"), "other services"),
    (pods.rights, "Job model", remove(f"{ONLY}|securityContext|readOnlyRootFilesystem"), "image"),
    (pods.rights, "Job model", remove(f"{ONLY}|securityContext|capabilities"), "capabilities"),
    (
        pods.rights,
        "Deployment decode",
        remove(f"{POD}|initContainers|0|securityContext|allowPrivilegeEscalation"),
        "gain",
    ),
    (pods.rights, "Issuer", put("kind", "ClusterRole"), "may not be created"),
    (
        pods.variables,
        "Deployment router",
        put(f"{ONLY}|env|0|name", "PDSERVE_DEVICE"),
        "does not know",
    ),
    (
        pods.variables,
        "Deployment router",
        put(f"{ONLY}|env|0", {"name": "PDSERVE_DRAIN_S", "value": "long"}),
        "PDSERVE_DRAIN_S",
    ),
    (pods.variables, "Deployment router", put(f"{ONLY}|env|0|value", "$(POD_IP):1"), "before"),
    (pods.variables, "Deployment router", put(f"{ONLY}|args", ["route"]), "no command"),
    (traffic.entrance, "HTTPRoute", remove("spec|rules|0|timeouts"), "before their time"),
    (traffic.entrance, "HTTPRoute", put("spec|rules|0|backendRefs|0|port", 81), "nowhere"),
    (traffic.entrance, "GRPCRoute", put("spec|parentRefs|0|name", "x"), "no listener"),
    (traffic.entrance, "GRPCRoute", put("spec|hostnames", ["x.org"]), "no listener of its host"),
    (traffic.entrance, "Gateway", put("spec|listeners|0|protocol", "HTTP"), "in clear"),
    (
        traffic.entrance,
        "Gateway",
        put("spec|listeners|0|tls|certificateRefs|0|name", "x"),
        "no Certificate makes",
    ),
    (traffic.certificates, "Certificate decode", put("spec|issuerRef|name", "x"), "no issuer"),
    (
        traffic.certificates,
        "Certificate decode",
        put("spec|secretName", "x"),
        "no Certificate makes",
    ),
    (pods.digests, "Deployment router", put(f"{ONLY}|image", "pdserve-control:latest"), "digest"),
    (pods.digests, "Deployment decode", put(f"{POD}|initContainers|0|image", "x"), "digest"),
    (
        pods.digests,
        "Deployment decode",
        put(f"{POD}|volumes|0", {"name": "m", "image": {"reference": "x"}}),
        "digest",
    ),
]


def test_a_breach_is_reported(subtests: pytest.Subtests) -> None:
    for rule, what, change, said in BREACHES:
        with subtests.test(f"{rule.__name__}: {said}"):
            overlay, _, rest = what.rpartition(": ")
            kind, _, name = rest.partition(" ")
            manifests = rendered(f"overlays/{overlay}" if overlay else RELEASE)
            before = set(rule(manifests))
            of_that_kind, full = of_kind(manifests, kind), f"pdserve-{name}" if name else "pdserve"
            if full not in of_that_kind:  # its name ends with a hash
                (full,) = (n for n in of_that_kind if n.startswith(f"{full}-"))
            change(of_that_kind[full])
            found = set(rule(manifests)) - before
            assert any(said in sentence for sentence in found), found


def test_every_rule_has_a_test_breach() -> None:
    assert {b[0] for b in BREACHES} == set(RELEASED)


def test_http_and_grpc_routes_of_the_same_host_are_reported(subtests: pytest.Subtests) -> None:
    for host in ("llm.example.com", "*.example.com", "*.com", None):
        with subtests.test(host=host):
            manifests = rendered(RELEASE)
            spec = of_kind(manifests, "GRPCRoute")["pdserve"]["spec"]
            if host is None:
                del spec["hostnames"]
            else:
                spec["hostnames"] = [host]
            spec["parentRefs"][0]["sectionName"] = "https"
            assert [said for said in traffic.entrance(manifests) if "takes one of" in said]


def variable(manifests: list[Manifest], deployment: str, name: str) -> Manifest:
    """Return a variable of the deployment's first container."""
    env = of_kind(manifests, "Deployment")[deployment]["spec"]["template"]["spec"]["containers"][0][
        "env"
    ]
    (found,) = [e for e in env if e["name"] == name]
    entry: Manifest = found
    return entry


def test_a_drain_shorter_than_a_stream_is_reported() -> None:
    manifests = rendered("overlays/cpu")
    variable(manifests, "pdserve-prefill", "PDSERVE_DRAIN_S")["value"] = "604"
    assert list(pods.drain(manifests)) == ["pdserve-prefill drains for less than a stream may take"]
    variable(manifests, "pdserve-gateway", "PDSERVE_REQUEST_TIMEOUT_S")["value"] = "900"
    assert len(list(pods.drain(manifests))) == 4


def test_a_worker_that_may_use_the_hub_is_reported() -> None:
    manifests = rendered(RELEASE)
    variable(manifests, "pdserve-decode", "HF_HUB_OFFLINE")["value"] = "0"
    assert list(pods.models(manifests)) == ["pdserve-decode may fetch its model"]
    variable(manifests, "pdserve-decode", "HF_HUB_OFFLINE")["value"] = "1"
    other = {"configMapKeyRef": {"name": "other", "key": "model"}}
    variable(manifests, "pdserve-decode", "PDSERVE_MODEL")["valueFrom"] = other
    assert [*pods.models(manifests)] == [
        "pdserve-decode has a model without its commit",
        "pdserve-decode waits for another model than the one that is fetched",
    ]


def test_a_model_without_its_commit_is_reported(subtests: pytest.Subtests) -> None:
    for model in ("org/name", "org/name@main", "org/name@abc", "org/name:x.gguf"):
        with subtests.test(model):
            manifests = rendered(RELEASE)
            (config,) = of_kind(manifests, "ConfigMap").values()
            config["data"]["model"] = model
            assert [said for said in pods.models(manifests) if "without its commit" in said]


def test_the_scaling_threshold_is_below_full_batches() -> None:
    manifests = rendered("components/autoscaling")
    triggers = of_kind(manifests, "ScaledObject")["pdserve-decode"]["spec"]["triggers"]
    (rows,) = [t["metadata"]["threshold"] for t in triggers if t["name"] == "rows"]
    most = variable(manifests, "pdserve-decode", "PDSERVE_MAX_RUNNING")["value"]
    assert float(rows) <= 0.8 * int(most)


def test_a_service_account_token_without_a_role_binding_is_reported() -> None:
    manifests = rendered("overlays/cpu")
    pod = of_kind(manifests, "Deployment")["pdserve-gateway"]["spec"]["template"]["spec"]
    pod |= {"automountServiceAccountToken": True, "serviceAccountName": "pdserve-discovery"}
    assert len(list(pods.rights(manifests))) == 1
    source = {"serviceAccountToken": {"path": "token"}}
    pod["volumes"].append({"name": "token", "projected": {"sources": [source]}})
    pod["automountServiceAccountToken"] = False
    assert len(list(pods.rights(manifests))) == 1
    subject = {"kind": "ServiceAccount", "name": "pdserve-discovery"}
    manifests.append({"kind": "RoleBinding", "metadata": {"name": "x"}, "subjects": [subject]})
    assert list(pods.rights(manifests)) == []
