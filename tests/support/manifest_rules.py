"""What every rendered kustomization under k8s/ keeps to. A rule yields a sentence for each breach."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import metrics_page
import promql_parser
from manifests import Manifest, Workload, of_kind, selects, workloads

from pdserve.services.cli.commands import COMMANDS
from pdserve.services.host.options import GRACE_S, STOP_S
from pdserve.services.options.options import ENV_PREFIX
from pdserve.services.worker.settings import CLOSE_S, LEAVE_S

NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
COMPONENT, POOL = "app.kubernetes.io/component", "pdserve.internal/pool"
WORKERS = ("prefill", "decode")
END_S = GRACE_S + STOP_S + LEAVE_S + CLOSE_S  # a stop after the drain (docs/bounds.md)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
SCALERS = ("ScaledObject", "HorizontalPodAutoscaler")
# Of KEDA's scaler `prometheus`; its schema takes any key.
TRIGGER = {"serverAddress", "query", "threshold", "activationThreshold", "namespace", "authModes"}
TRIGGER |= {"ignoreNullValues"}
SAMPLE = re.compile(r"_(total|bucket|sum|count)$")
Rule = Callable[[list[Manifest]], Iterator[str]]


def probes(manifests: list[Manifest]) -> Iterator[str]:
    """Whatever serves is asked whether it has started, is ready and lives, at a port that it has."""
    for workload in workloads(manifests):
        for container in () if workload.ends else workload.containers:
            ports = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
            for name in PROBES:
                probe = container.get(name, {})
                asked = probe.get("grpc") or probe.get("httpGet") or probe.get("tcpSocket")
                if not asked:
                    yield f"{workload.name} has no {name}"
                elif asked["port"] not in (*ports, *ports.values()):
                    yield f"{name} of {workload.name} asks a port that it does not have"


def spread(manifests: list[Manifest]) -> Iterator[str]:
    """Pods of a role are apart over zones and nodes; groups have a domain each."""
    for workload in workloads(manifests):
        if workload.ends:
            continue
        if workload.kind == "LeaderWorkerSet":
            notes = workload.manifest["metadata"].get("annotations", {})
            if not notes.get("leaderworkerset.sigs.k8s.io/exclusive-topology"):
                yield f"{workload.name} has no topology of its own"
            continue
        over = {
            c["topologyKey"]
            for c in workload.pod.get("topologySpreadConstraints", [])
            if _alike(c, workload)
        }
        if not over >= {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}:
            yield f"{workload.name} is not spread over zones and nodes"
        affinity = workload.pod.get("affinity", {}).get("podAntiAffinity", {})
        terms = [
            *affinity.get("requiredDuringSchedulingIgnoredDuringExecution", []),
            *(
                p["podAffinityTerm"]
                for p in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
            ),
        ]
        if not any(_alike(term, workload) for term in terms):
            yield f"{workload.name} does not avoid others of its role"


def _alike(term: Manifest, workload: Workload) -> bool:
    """Whether a term is about pods of that role of that system."""
    selector = term.get("labelSelector")
    named = {*(selector or {}).get("matchLabels", {}), *term.get("matchLabelKeys", [])}
    return selects(selector, workload.labels) and {NAME, COMPONENT} <= named


def drain(manifests: list[Manifest]) -> Iterator[str]:
    """A pod that ends has time for its longest stream, and is not killed before that is over."""
    found = [w for w in workloads(manifests) if not w.ends]
    longest = max((w.number("PDSERVE_REQUEST_TIMEOUT_S") or 0 for w in found), default=0)
    late = max((w.number("PDSERVE_LAME_DUCK_S") or 0 for w in found), default=0)
    for workload in found:
        grace_s = workload.pod.get("terminationGracePeriodSeconds", 30)
        drain_s = workload.number("PDSERVE_DRAIN_S")
        if drain_s is None:
            yield f"{workload.name} does not say how long it drains"
        elif drain_s < longest + late:
            yield f"{workload.name} drains for less than a stream may take"
        elif grace_s < drain_s + END_S:
            yield f"{workload.name} is killed before its drain is over"
        for container in workload.containers:
            if "lifecycle" in container:
                yield f"{workload.name}: a preStop would take its share of the drain"


def scalers(manifests: list[Manifest]) -> Iterator[str]:
    """What scales is there, has no fixed number, and goes down slowly."""
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
        if key[0] == "Deployment" and key not in scaled and "replicas" not in workload.manifest["spec"]:
            yield f"nothing says how many there are of {key[1]}"


def _behavior(scaler: Manifest) -> Manifest:
    spec: Manifest = scaler["spec"]
    if scaler["kind"] == "ScaledObject":
        spec = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
    found: Manifest = spec.get("behavior", {})
    return found


def limits_of(scaler: Manifest) -> tuple[int, int]:
    """The least and the most replicas."""
    spec, keda = scaler["spec"], scaler["kind"] == "ScaledObject"
    words = ("minReplicaCount", "maxReplicaCount") if keda else ("minReplicas", "maxReplicas")
    low, high = (spec.get(word, 0) for word in words)
    return low, high


def metrics(manifests: list[Manifest]) -> Iterator[str]:
    """A scaler asks for metrics that we emit, of pods that there are, in words that KEDA knows."""
    known = metrics_page.names()
    pods = [w.name for w in workloads(manifests)]
    for name, scaler in of_kind(manifests, "ScaledObject").items():
        for trigger in scaler["spec"]["triggers"]:
            what = f"trigger {trigger.get('name')} of {name}"
            if trigger["type"] != "prometheus":
                yield f"{what} is of another type"
                continue
            asked = trigger["metadata"]
            if unknown := asked.keys() - TRIGGER:
                yield f"{what} has unknown words: {', '.join(sorted(unknown))}"
            if missing := {"serverAddress", "query", "threshold"} - asked.keys():
                yield f"{what} lacks {', '.join(sorted(missing))}"
                continue
            if asked.get("ignoreNullValues") != "false":
                yield f"{what} takes a Prometheus without figures for idleness"
            if trigger.get("metricType") not in ("Value", "AverageValue"):
                yield f"{what} does not say whether it is a ratio or a sum"
            try:
                found = list(selectors(promql_parser.parse(asked["query"])))
            except ValueError as error:
                yield f"{what} is no query: {error}"
                continue
            for metric, pod in found:
                if not {metric, SAMPLE.sub("", metric)} & known:
                    yield f"{what} asks for {metric}, which nobody emits"
                if pod and not any(re.fullmatch(pod, f"{p}-0") for p in pods):
                    yield f"{what} asks for pods {pod}, which nobody has"


def selectors(query: Any) -> Iterator[tuple[str, str]]:
    """(metric, what is asked of its label `pod`) of each vector selector in a query."""
    if isinstance(query, promql_parser.VectorSelector):
        pod = [m.value for m in query.matchers.matchers if m.name == "pod"]
        yield query.name, pod[0] if pod else ""
        return
    for part in ("expr", "lhs", "rhs", "vector_selector"):
        if (inner := getattr(query, part, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(query, "args", []):
        yield from selectors(inner)


def sizes(manifests: list[Manifest]) -> Iterator[str]:
    """Every container asks for what it needs and is bounded in memory and disk; so is each volume."""
    for workload in workloads(manifests):
        for container in workload.every_container:
            resources, what = container.get("resources", {}), f"{container['name']} of {workload.name}"
            asked, most = resources.get("requests", {}), resources.get("limits", {})
            for name in sorted({"cpu", "memory", "ephemeral-storage"} - asked.keys()):
                yield f"{what} asks for no {name}"
            for name in sorted({"memory", "ephemeral-storage"} - most.keys()):
                yield f"{what} has no limit of {name}"
        for volume in workload.pod.get("volumes", []):
            if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
                yield f"volume {volume['name']} of {workload.name} has no limit"


def own_selectors(manifests: list[Manifest]) -> Iterator[str]:
    """Selectors name the system, its instance and the role, so they meet our pods and no others."""
    pods = workloads(manifests)
    for workload in pods:
        for label in (NAME, INSTANCE, COMPONENT, "app.kubernetes.io/part-of"):
            if not workload.labels.get(label):
                yield f"pods of {workload.name} have no label {label}"
        if workload.labels.get(NAME) != "pdserve":
            yield f"pods of {workload.name} are called {workload.labels.get(NAME)}"
        selector = workload.manifest["spec"].get("selector")
        if selector and workload.kind != "Job":
            met = [w.name for w in pods if selects(selector, w.labels)]
            if met != [workload.name]:
                yield f"{workload.name} selects {met}"
            wanted = {NAME, INSTANCE, COMPONENT} | ({POOL} if workload.role in WORKERS else set())
            if missing := wanted - selector.get("matchLabels", {}).keys():
                yield f"{workload.name} selects without {', '.join(sorted(missing))}"
    for manifest in manifests:
        for selector in _selectors(manifest):
            what = f"{manifest['kind']} {manifest['metadata']['name']}"
            matched = selector.get("matchLabels", {})
            if not {NAME, INSTANCE} <= matched.keys():
                yield f"{what} may select pods of others"
            elif not any(selects(selector, w.labels) for w in pods):
                yield f"{what} selects nothing"
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if name != "pdserve" and not name.startswith("pdserve-"):
            yield f"{manifest['kind']} {name} may be another's"


def _selectors(manifest: Manifest) -> Iterator[Manifest]:
    """Of pods of this namespace."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "Service" and spec.get("selector"):
        yield {"matchLabels": spec["selector"]}
    elif kind in ("PodDisruptionBudget", "PodMonitor", "InferencePool"):
        yield spec["selector"]
    elif kind == "NetworkPolicy":
        yield spec["podSelector"]
        for way, peers in (("ingress", "from"), ("egress", "to")):
            for rule in spec.get(way) or []:
                for peer in rule.get(peers) or []:
                    if "podSelector" in peer and "namespaceSelector" not in peer:
                        yield peer["podSelector"]


def egress(manifests: list[Manifest]) -> Iterator[str]:
    """Nobody opens a connection unless a policy says where to; the internet is for the model's Job."""
    policies = of_kind(manifests, "NetworkPolicy").values()
    for workload in workloads(manifests):
        mine = [p["spec"] for p in policies if selects(p["spec"]["podSelector"], workload.labels)]
        for way in ("Ingress", "Egress"):
            if not any(way in p["policyTypes"] and not p.get(way.lower()) for p in mine):
                yield f"{workload.name}: {way} is open"
        rules = [r for p in mine if "Egress" in p["policyTypes"] for r in p.get("egress") or []]
        if not any(53 in [port["port"] for port in r.get("ports", [])] for r in rules):
            yield f"{workload.name} cannot ask DNS"
        for rule in rules:
            if not rule.get("to") or not rule.get("ports"):
                yield f"{workload.name} may go anywhere"
            blocks = [t["ipBlock"] for t in rule.get("to", []) if "ipBlock" in t]
            for block in blocks:
                if block["cidr"] in ("0.0.0.0/0", "::/0"):
                    if workload.role != "model":
                        yield f"{workload.name} reaches the internet"
                    elif not block.get("except"):
                        yield f"{workload.name} reaches private networks"
    for policy in policies:
        for rule in policy["spec"].get("egress") or []:
            for peer in rule.get("to") or []:
                if "podSelector" not in peer or "namespaceSelector" in peer:
                    continue
                met = [w for w in workloads(manifests) if selects(peer["podSelector"], w.labels)]
                names = {p["name"] for w in met for c in w.containers for p in c.get("ports", [])}
                wanted = {p["port"] for p in rule.get("ports", []) if isinstance(p["port"], str)}
                if wanted - names:
                    yield f"{policy['metadata']['name']}: nobody has port {wanted - names}"


def budgets(manifests: list[Manifest]) -> Iterator[str]:
    """A drained node takes one pod of a role at a time."""
    found = of_kind(manifests, "PodDisruptionBudget").values()
    for workload in workloads(manifests):
        if workload.ends:
            continue
        mine = [b["spec"] for b in found if selects(b["spec"]["selector"], workload.labels)]
        if [b.get("maxUnavailable") for b in mine] != [1]:
            yield f"{workload.name} has {len(mine)} budgets of one pod"  # two would block a drain


def models(manifests: list[Manifest]) -> Iterator[str]:
    """A model is read from an image or a volume that others fill; no server fetches or changes it."""
    for workload in workloads(manifests):
        shared = {
            v["name"]: v
            for v in workload.pod.get("volumes", [])
            if "persistentVolumeClaim" in v or "image" in v
        }
        for container in () if workload.ends else workload.every_container:
            for mount in container.get("volumeMounts", []):
                if mount["name"] in shared and not mount.get("readOnly"):
                    yield f"{workload.name} may change {mount['name']}"
        if workload.ends or workload.role not in WORKERS:
            continue
        for name, volume in shared.items():
            claim = volume.get("persistentVolumeClaim")
            if claim and not claim.get("readOnly"):
                yield f"{workload.name} holds {name} for writing"
        env = workload.environment()
        model = env["PDSERVE_MODEL"]
        if "valueFrom" not in model and model.get("value", "")[:1] in ("", "/"):
            continue
        if env.get("HF_HUB_OFFLINE", {}).get("value") != "1":
            yield f"{workload.name} may fetch its model"
        waits = [c for c in workload.pod.get("initContainers", []) if "wait" in c["command"]]
        fetched = {
            e.get("valueFrom", {}).get("configMapKeyRef", {}).get("name")
            for w in workloads(manifests)
            for n, e in w.environment().items()
            if w.ends and n == "PDSERVE_MODEL"
        }
        if not waits or not fetched:
            yield f"{workload.name} may start with half a model"
        elif fetched != {model["valueFrom"]["configMapKeyRef"]["name"]}:
            yield f"{workload.name} waits for another model than the one that is fetched"


def rights(manifests: list[Manifest]) -> Iterator[str]:
    """Pods have no rights; a token is for those that name an account of their own."""
    bound = {
        subject["name"]
        for binding in of_kind(manifests, "RoleBinding").values()
        for subject in binding["subjects"]
        if subject["kind"] == "ServiceAccount"
    }
    for manifest in manifests:
        if manifest["kind"] in ("ClusterRole", "ClusterRoleBinding", "Secret"):
            yield f"{manifest['kind']} {manifest['metadata']['name']} is not ours to make"
    for workload in workloads(manifests):
        pod, of_pod = workload.pod, workload.pod.get("securityContext", {})
        if of_pod.get("runAsNonRoot") is not True or not of_pod.get("runAsUser"):
            yield f"{workload.name} may be root"
        if of_pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{workload.name} may make any call of the kernel"
        if pod.get("automountServiceAccountToken") is not False and (
            pod.get("serviceAccountName") not in bound
        ):
            yield f"{workload.name} has a token that it does not need"
        if pod.get("enableServiceLinks") is not False:
            yield f"{workload.name} has variables of other services"
        for container in workload.every_container:
            of_container, what = container.get("securityContext", {}), f"{container['name']} of"
            if of_container.get("allowPrivilegeEscalation") is not False:
                yield f"{what} {workload.name} may gain privileges"
            if of_container.get("readOnlyRootFilesystem") is not True:
                yield f"{what} {workload.name} may change its image"
            if of_container.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{what} {workload.name} has capabilities"


def variables(manifests: list[Manifest]) -> Iterator[str]:
    """Variables are options of the command that reads them, with good values."""
    for workload in workloads(manifests):
        for container in workload.containers:
            command = (container.get("args") or [""])[0]
            if container.get("command") or command not in COMMANDS:
                if not container.get("command"):
                    yield f"{workload.name} runs {command!r}, which is no command"
                continue
            known = {o.env: o for s in COMMANDS[command].sections() for o in s.options}
            seen: set[str] = set()
            for entry in container.get("env", []):
                name, value = entry["name"], entry.get("value")
                if name in seen:
                    yield f"{workload.name} has {name} twice"
                for other in re.findall(r"\$\((\w+)\)", value or ""):
                    if other not in seen:
                        yield f"{workload.name}: {name} uses {other} before it is known"
                seen.add(name)
                if not name.startswith(ENV_PREFIX):
                    continue
                if name not in known:
                    yield f"{command} does not know {name}"
                elif value:
                    try:
                        known[name].parse(value, name)
                    except ValueError as error:
                        yield f"{workload.name}: {error}"


def entrance(manifests: list[Manifest]) -> Iterator[str]:
    """Clients come by TLS, to services that are there, and an answer may take as long as it may."""
    services = of_kind(manifests, "Service")
    secrets = {c["spec"]["secretName"] for c in of_kind(manifests, "Certificate").values()}
    listeners = {
        (gateway["metadata"]["name"], listener["name"]): listener
        for gateway in manifests
        if gateway["kind"] == "Gateway"
        for listener in gateway["spec"]["listeners"]
    }
    for (_, name), listener in listeners.items():
        refs = listener.get("tls", {}).get("certificateRefs", [])
        if listener["protocol"] not in ("HTTPS", "TLS") or not refs:
            yield f"listener {name} speaks in clear"
        elif {r["name"] for r in refs} - secrets:
            yield f"listener {name} has a certificate that nobody makes"
    longest = max((w.number("PDSERVE_REQUEST_TIMEOUT_S") or 0 for w in workloads(manifests)), default=0)
    for route in manifests:
        if route["kind"] not in ("HTTPRoute", "GRPCRoute"):
            continue
        name = route["metadata"]["name"]
        for parent in route["spec"]["parentRefs"]:
            if (parent["name"], parent.get("sectionName")) not in listeners:
                yield f"{route['kind']} {name} has no listener"
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                if backend.get("kind", "Service") != "Service":
                    continue
                ports = services.get(backend["name"], {"spec": {"ports": []}})["spec"]["ports"]
                if backend["port"] not in [p["port"] for p in ports]:
                    yield f"{route['kind']} {name} leads nowhere"
            seconds = rule.get("timeouts", {}).get("request", "15s")
            if route["kind"] == "HTTPRoute" and float(seconds.removesuffix("s")) <= longest:
                yield f"HTTPRoute {name} ends answers before their time"


def certificates(manifests: list[Manifest]) -> Iterator[str]:
    """A certificate has an issuer; one of this cluster's is made here."""
    issuers = of_kind(manifests, "Issuer")
    for name, certificate in of_kind(manifests, "Certificate").items():
        issuer = certificate["spec"]["issuerRef"]
        if issuer.get("kind", "Issuer") == "Issuer" and issuer["name"] not in issuers:
            yield f"certificate {name} has no issuer"
    made = {c["spec"]["secretName"] for c in of_kind(manifests, "Certificate").values()}
    for workload in workloads(manifests):
        for volume in workload.pod.get("volumes", []):
            if volume["name"] == "tls" and volume["secret"]["secretName"] not in made:
                yield f"{workload.name} has a certificate that nobody makes"


def digests(manifests: list[Manifest]) -> Iterator[str]:
    """Images are what was tested, whatever a tag becomes. Of a release."""
    for workload in workloads(manifests):
        images = {c["image"] for c in workload.every_container}
        volumes = workload.pod.get("volumes", [])
        images |= {v["image"]["reference"] for v in volumes if "image" in v}
        for image in sorted(images):
            if not re.search(r"@sha256:[0-9a-f]{64}$", image):
                yield f"{image} of {workload.name} has no digest"


ALWAYS: tuple[Rule, ...] = (
    probes,
    spread,
    drain,
    scalers,
    metrics,
    sizes,
    own_selectors,
    egress,
    budgets,
    models,
    rights,
    variables,
    entrance,
    certificates,
)
RELEASED: tuple[Rule, ...] = (*ALWAYS, digests)
