"""Rules about connections: selectors, policies, ingress, certificates."""

from collections.abc import Iterator
from itertools import combinations

from builders.manifests import Manifest, of_kind, selects, workloads

from oracles.manifest_rules.labels import COMPONENT, INSTANCE, NAME, POOL, WORKERS

OWN = ("Service", "PodDisruptionBudget")  # a second system in this namespace has its own


def own_selectors(manifests: list[Manifest]) -> Iterator[str]:
    """Selectors name the system, its instance and the role, so they match only pdserve's pods."""
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
            wanted = {NAME, INSTANCE} if manifest["kind"] in OWN else {NAME}
            if not wanted <= selector.get("matchLabels", {}).keys():
                yield f"{what} may select pods of others"
            elif not any(selects(selector, w.labels) for w in pods):
                yield f"{what} selects nothing"
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if name != "pdserve" and not name.startswith("pdserve-"):
            yield f"{manifest['kind']} {name} may be another's"


def _selectors(manifest: Manifest) -> Iterator[Manifest]:
    """Return selectors of pods of this namespace."""
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
    """No pod opens a connection unless a policy allows it; the model's Job reaches the hub."""
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
                    yield f"{policy['metadata']['name']}: no workload has port {wanted - names}"


def entrance(manifests: list[Manifest]) -> Iterator[str]:
    """Clients connect by TLS, to services that exist, and timeouts allow the longest answer."""
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
            yield f"listener {name} has a certificate that no Certificate makes"
    longest = max(
        (w.number("PDSERVE_REQUEST_TIMEOUT_S") or 0 for w in workloads(manifests)), default=0
    )
    hosts: list[tuple[str, tuple[str, str], str]] = []  # by kind of route and listener
    for route in manifests:
        if route["kind"] not in ("HTTPRoute", "GRPCRoute"):
            continue
        name = route["metadata"]["name"]
        for parent in route["spec"]["parentRefs"] if listeners else ():  # else it is another's
            mine = [
                (route["kind"], key, host)
                for key, listener in listeners.items()
                if key[0] == parent["name"] and parent.get("sectionName", key[1]) == key[1]
                for host in route["spec"].get("hostnames", [listener.get("hostname", "")])
                if _in_common(host, listener.get("hostname", ""))
            ]
            if not mine:
                yield f"{route['kind']} {name} has no listener of its host"
            hosts += mine
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

    for (kind, key, host), (other, other_key, other_host) in combinations(hosts, 2):
        if kind != other and key == other_key and _in_common(host, other_host):
            yield f"a Gateway takes one of {kind} and {other} for {host or 'any host'}"


def _in_common(one: str, other: str) -> bool:
    """Return whether two of a route's or a listener's hostnames have a host in common; empty: any
    has.
    """
    pairs = ((one, other), (other, one))
    return one == other or any(not a or (a[:2] == "*." and b.endswith(a[1:])) for a, b in pairs)


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
                yield f"{workload.name} has a certificate that no Certificate makes"
