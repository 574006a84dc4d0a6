"""Rules about pods: probes, placement, shutdown, limits and rights."""

import re
from collections.abc import Iterator

from builders.manifests import Manifest, Workload, of_kind, selects, workloads

from oracles.manifest_rules.labels import COMPONENT, NAME, WORKERS
from pdserve.cli.commands import COMMANDS
from pdserve.cli.options import ENV_PREFIX, OptionError
from pdserve.services.common.options import GRACE_S, STOP_S
from pdserve.services.worker.settings import DEREGISTER_S, ENGINE_CLOSE_S

END_S = GRACE_S + STOP_S + DEREGISTER_S + ENGINE_CLOSE_S  # a stop after the drain (docs/bounds.md)
PINNED_MODEL = re.compile(r"[^@]+@[0-9a-f]{40}(:.+)?")  # accepted by model_volume.py
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def probes(manifests: list[Manifest]) -> Iterator[str]:
    """Every server has startup, readiness and liveness probes, at one of its ports."""
    for workload in workloads(manifests):
        for container in () if workload.ends else workload.containers:
            ports = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
            for name in PROBES:
                probe = container.get(name, {})
                request = probe.get("grpc") or probe.get("httpGet") or probe.get("tcpSocket")
                if not request:
                    yield f"{workload.name} has no {name}"
                elif request["port"] not in (*ports, *ports.values()):
                    yield f"{name} of {workload.name} asks a port that it does not have"


def spread(manifests: list[Manifest]) -> Iterator[str]:
    """Pods of a role are spread over zones and nodes; groups have a domain each."""
    for workload in workloads(manifests):
        if workload.ends:
            continue
        if workload.kind == "LeaderWorkerSet":
            notes = workload.manifest["metadata"].get("annotations", {})
            if not notes.get("leaderworkerset.sigs.k8s.io/exclusive-topology"):
                yield f"{workload.name} has no topology"
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
    """Return whether a term selects pods of that role of that system."""
    selector = term.get("labelSelector")
    named = {*(selector or {}).get("matchLabels", {}), *term.get("matchLabelKeys", [])}
    return selects(selector, workload.labels) and {NAME, COMPONENT} <= named


def drain(manifests: list[Manifest]) -> Iterator[str]:
    """A pod that ends has time for its longest stream, and is not killed before."""
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


def sizes(manifests: list[Manifest]) -> Iterator[str]:
    """Every container requests its resources; its memory, its disk and each volume are bounded."""
    for workload in workloads(manifests):
        for container in workload.every_container:
            resources, what = (
                container.get("resources", {}),
                f"{container['name']} of {workload.name}",
            )
            request, most = resources.get("requests", {}), resources.get("limits", {})
            for name in sorted({"cpu", "memory", "ephemeral-storage"} - request.keys()):
                yield f"{what} asks for no {name}"
            for name in sorted({"memory", "ephemeral-storage"} - most.keys()):
                yield f"{what} has no limit of {name}"
        for volume in workload.pod.get("volumes", []):
            if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
                yield f"volume {volume['name']} of {workload.name} has no limit"


def models(manifests: list[Manifest]) -> Iterator[str]:
    """A model is in an image or on a volume that a Job fills with a commit; no server fetches or
    changes it.
    """
    for workload in workloads(manifests):
        source = workload.environment().get("PDSERVE_MODEL", {}).get("valueFrom")
        if source is not None:
            key = source["configMapKeyRef"]
            named = of_kind(manifests, "ConfigMap").get(key["name"], {"data": {}})["data"]
            if not PINNED_MODEL.fullmatch(named.get(key["key"], "")):
                yield f"{workload.name} has a model without its commit"
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
        elif model["valueFrom"]["configMapKeyRef"]["name"] not in fetched:
            yield f"{workload.name} waits for another model than the one that is fetched"


def rights(manifests: list[Manifest]) -> Iterator[str]:
    """Pods have no rights; only pods that name a separate service account have a token."""
    bound = {
        subject["name"]
        for binding in of_kind(manifests, "RoleBinding").values()
        for subject in binding["subjects"]
        if subject["kind"] == "ServiceAccount"
    }
    for manifest in manifests:
        if manifest["kind"] in ("ClusterRole", "ClusterRoleBinding", "Secret"):
            yield f"{manifest['kind']} {manifest['metadata']['name']} may not be created"
    for workload in workloads(manifests):
        pod, of_pod = workload.pod, workload.pod.get("securityContext", {})
        if of_pod.get("runAsNonRoot") is not True or not of_pod.get("runAsUser"):
            yield f"{workload.name} may be root"
        if of_pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{workload.name} may make any call of the kernel"
        sources = [
            s for v in pod.get("volumes", []) for s in v.get("projected", {}).get("sources", [])
        ]
        token = any("serviceAccountToken" in source for source in sources)
        token |= pod.get("automountServiceAccountToken") is not False
        if token and pod.get("serviceAccountName") not in bound:
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
    """Variables are options of the command that reads them, with valid values."""
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
                    except OptionError as error:
                        yield f"{workload.name}: {error}"


def digests(manifests: list[Manifest]) -> Iterator[str]:
    """Images of a release are pinned by digest, so that a moved tag changes nothing."""
    for workload in workloads(manifests):
        images = {c["image"] for c in workload.every_container}
        volumes = workload.pod.get("volumes", [])
        images |= {v["image"]["reference"] for v in volumes if "image" in v}
        for image in sorted(images):
            if not re.search(r"@sha256:[0-9a-f]{64}$", image):
                yield f"{image} of {workload.name} has no digest"
