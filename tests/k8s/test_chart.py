"""The Helm chart renders what kustomize renders, and refuses values that its schema does not
allow."""

import json
import re
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from builders.chart import (
    CHART,
    EXAMPLES,
    GATEWAY_API,
    MODEL,
    NAMESPACE,
    Chart,
    Values,
    is_hook,
)
from builders.manifests import Manifest, of_kind, rendered, workloads
from fakes.kubernetes import in_pod
from oracles.manifest_rules import ALWAYS, traffic

from pdserve.cli.main import main

ROOT = Path(__file__).parents[2]
BY_CERT_MANAGER: Values = {"certificates": {"source": "cert-manager"}}
# Values, and the kustomizations that give the same objects.
SAME: dict[str, tuple[Values, tuple[str, ...]]] = {
    "cpu": ({}, ("overlays/cpu",)),
    "gpu": ({"workers": {"device": "gpu"}}, ("overlays/gpu",)),
    "autoscaling": ({"autoscaling": {"workers": True}}, ("components/autoscaling",)),
    "model volume": ({"model": {"huggingFace": MODEL}}, ("components/model-volume",)),
    "model image": (
        {
            "model": {
                "image": {
                    "reference": "registry.example.com/models/qwen3-0.6b",
                    "name": "Qwen3-0.6B",
                }
            }
        },
        ("components/model-image",),
    ),
    "gateway API": ({"gatewayApi": GATEWAY_API}, ("components/gateway-api",)),
    "database": ({"database": {"existingSecret": "pdserve-database"}}, ("components/database",)),
    "monitoring": (
        {"monitoring": {"enabled": True, "runbookUrl": "https://pdserve.example/docs/runbook.md"}},
        ("observability",),
    ),
}
# What differs: Helm's labels, and other labels that an object (not its pods or selectors) has in
# addition; the annotation of hooks; tags of images; the namespace in the scalers' queries; the hash
# in the name of the model's ConfigMap and Job. The order of lists whose entries have names means
# nothing.
HELM_LABELS = {"helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"}
QUERIED = re.compile(r"(?:vllm:|pdserve_)\w+")


def merged(*parts: Values) -> Values:
    found: Values = {}
    for part in parts:
        for name, value in part.items():
            inner = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = merged(found[name], value) if inner else deepcopy(value)
    return found


def comparable(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    """Return the objects by kind and name, without the differences that are allowed."""
    hashed = [
        m["metadata"]["name"]
        for m in manifests
        if m["kind"] == "ConfigMap" and m["metadata"]["name"].startswith("pdserve-model-")
    ]
    text = json.dumps(manifests)
    for name in hashed:
        text = text.replace(name, "pdserve-model-HASH")
    found = [_plain(m) for m in json.loads(text)]
    return {(m["kind"], m["metadata"]["name"]): m for m in found}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {k: _plain(v) for k, v in value.items() if k not in HELM_LABELS}
        if plain.get("annotations", {}).keys() == {"helm.sh/hook"}:
            del plain["annotations"]
        if isinstance(plain.get("query"), str):
            plain["query"] = plain["query"].replace(f'namespace="{NAMESPACE}",', "")
        if isinstance(plain.get("image"), str):
            plain["image"] = plain["image"].partition(":")[0]
        return plain
    if isinstance(value, list):
        entries = [_plain(entry) for entry in value]
        named = all(isinstance(entry, dict) and "name" in entry for entry in entries)
        return sorted(entries, key=lambda entry: str(entry["name"])) if named else entries
    return value


def test_the_chart_renders_the_objects_of_kustomize(
    chart: Chart, subtests: pytest.Subtests
) -> None:
    for what, (values, names) in SAME.items():
        with subtests.test(what):
            mine = comparable(chart.objects(merged(BY_CERT_MANAGER, values)))
            theirs = comparable(rendered(*names))
            assert mine.keys() == theirs.keys()
            for key, manifest in theirs.items():
                labels = manifest["metadata"].pop("labels")
                assert mine[key]["metadata"].pop("labels").items() >= labels.items()
                assert mine[key] == manifest, key


def test_the_default_needs_neither_cert_manager_nor_a_digest(chart: Chart) -> None:
    objects = chart.objects()
    applied = comparable([m for m in objects if not is_hook(m)])
    of_cert_manager = comparable(chart.objects(BY_CERT_MANAGER))
    assert {m["apiVersion"].partition("/")[0] for m in of_cert_manager.values()} > {
        "cert-manager.io"
    }
    kinds = ("Certificate", "Issuer")
    assert applied == {k: m for k, m in of_cert_manager.items() if k[0] not in kinds}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {c["image"] for w in workloads(objects) for c in w.every_container}
    assert images == {f"pdserve-control:{version}", f"pdserve-worker:{version}"}


def test_the_chart_has_the_version_of_the_package() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (about["version"], about["appVersion"]) == (version, version)


def test_the_job_that_creates_certificates(
    chart: Chart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def secrets_written_by(args: list[str]) -> set[str]:
        with in_pod(tmp_path, monkeypatch) as api:
            assert main(args) == 0
        return set(api.secrets)

    def hooks(values: Values) -> dict[str, Manifest]:
        return {m["kind"]: m for m in chart.objects(values) if is_hook(m)}

    found = hooks({})
    assert set(found) == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Job"}
    pod = found["Job"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["args"] == ["certs", "kubernetes:///pdserve", "--days=365", "--keep-existing"]
    create, change = found["Role"]["rules"]
    assert create["verbs"] == ["create"]
    assert change["verbs"] == ["get", "update"]
    roles = ("ca", "gateway", "router", "prefill", "decode")
    assert change["resourceNames"] == [f"pdserve-{role}" for role in roles]
    mounted = {
        v["secret"]["secretName"]
        for w in workloads(chart.objects())
        for v in w.pod.get("volumes", [])
        if v["name"] == "tls"
    }
    assert mounted == set(change["resourceNames"]) - {"pdserve-ca"}
    assert secrets_written_by(container["args"]) == set(change["resourceNames"])
    renewed = hooks({"certificates": {"renew": True}})["Job"]["spec"]["template"]["spec"]
    assert "--keep-existing" not in renewed["containers"][0]["args"]
    assert not hooks({"certificates": {"source": "secrets"}})


def test_rendered_objects_keep_the_rules(chart: Chart, subtests: pytest.Subtests) -> None:
    """The values of SAME are not repeated: their objects are those of kustomize."""
    for what, values in EXAMPLES.items():
        with subtests.test(what):
            assert chart.lint(values) == []
            objects = chart.objects(values)
            keys = [(m["kind"], m["metadata"]["name"]) for m in objects]
            assert len(keys) == len(set(keys))
            # A Secret of hashes is the chart's, and certificates need no Certificate.
            others = [m for m in objects if m["kind"] != "Secret"]
            for rule in ALWAYS:
                if rule is not traffic.certificates:
                    assert list(rule(others)) == []


def test_values_reach_the_objects(chart: Chart) -> None:
    objects = chart.objects(EXAMPLES["many"])
    decode = of_kind(objects, "Deployment")["pdserve-other-decode"]["spec"]["template"]["spec"]
    env = {e["name"]: e for e in decode["containers"][0]["env"]}
    assert len(env) == len(decode["containers"][0]["env"])
    assert env["PDSERVE_ENCRYPT_KV"]["value"] == "true"
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert decode["nodeSelector"] == {"disk": "ssd"}
    assert decode["tolerations"] == [{"key": "batch", "operator": "Exists"}]
    assert decode["containers"][0]["resources"]["requests"]["cpu"] == "1"
    assert decode["imagePullSecrets"] == [{"name": "registry"}]
    accounts = {w.pod.get("serviceAccountName") for w in workloads(objects) if not w.ends}
    assert accounts == {"pdserve-other"} <= of_kind(objects, "ServiceAccount").keys()
    images = {c["image"] for w in workloads(objects) for c in w.every_container}
    assert f"pdserve-control@sha256:{'a' * 64}" in images
    assert of_kind(objects, "Service")["pdserve-other-gateway"]["spec"]["type"] == "LoadBalancer"
    assert of_kind(objects, "Deployment")["pdserve-other-gateway"]["spec"]["replicas"] == 2
    assert of_kind(objects, "Secret")["pdserve-other"]["data"]
    scaler = of_kind(objects, "ScaledObject")["pdserve-other-decode"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == "pdserve-other-decode"
    jobs = [w.pod for w in workloads(objects) if w.ends]
    assert len(jobs) == len(("certificates", "model"))
    for job in jobs:
        assert job["nodeSelector"] == {"disk": "ssd"}
        assert job["tolerations"] == [{"operator": "Exists"}]
    (alerts,) = of_kind(objects, "PrometheusRule").values()
    rules = [rule for group in alerts["spec"]["groups"] for rule in group["rules"]]
    assert [rule for rule in rules if "runbook_url" in rule["annotations"]] == []


def test_resources_of_a_role_keep_the_rest_of_its_device(chart: Chart) -> None:
    values = {"workers": {"device": "gpu"}, "decode": {"resources": {"limits": {"memory": "32Gi"}}}}
    deployments = of_kind(chart.objects(values), "Deployment")
    prefill, decode = (
        deployments[f"pdserve-{role}"]["spec"]["template"]["spec"]["containers"][0]["resources"]
        for role in ("prefill", "decode")
    )
    assert decode["limits"] == {**prefill["limits"], "memory": "32Gi"}
    assert decode["requests"] == prefill["requests"]
    assert (prefill["limits"]["memory"], prefill["limits"]["nvidia.com/gpu"]) == ("16Gi", "1")


def test_helm_deletes_no_config_map_that_pods_of_another_release_read(chart: Chart) -> None:
    """Helm deletes what the new release no longer has, hooks without a policy excepted."""
    values: Values = {"model": {"huggingFace": MODEL}}
    old, new = (
        of_kind(chart.objects(merged(values, changed)), "ConfigMap")
        for changed in ({}, {"images": {"worker": {"tag": "next"}}})
    )
    assert not old.keys() & new.keys()
    for config in (*old.values(), *new.values()):
        annotations = config["metadata"]["annotations"]
        assert annotations == {"helm.sh/hook": "pre-install,pre-upgrade,pre-rollback"}


def test_names_that_services_cannot_have_are_refused(
    chart: Chart, subtests: pytest.Subtests
) -> None:
    for release in ("llm.prod", "1st"):
        with subtests.test(release):
            with pytest.raises(ValueError, match="set fullnameOverride"):
                chart.objects(release=release)
            assert chart.objects({"fullnameOverride": "prod"}, release)


def test_scalers_query_only_their_release(chart: Chart) -> None:
    objects = chart.objects({"autoscaling": {"workers": True}}, "other")
    scalers = of_kind(objects, "ScaledObject").values()
    queries = [t["metadata"]["query"] for s in scalers for t in s["spec"]["triggers"]]
    own = re.compile(
        rf'{{namespace="{NAMESPACE}",pod=~"other-pdserve-(router|prefill|decode)-\.\*"}}'
    )
    found = [(query, name) for query in queries for name in QUERIED.finditer(query)]
    assert len(found) > len(queries) > 1
    for query, name in found:
        assert own.match(query, name.end()), query


def test_two_releases_share_no_name_and_no_pod(chart: Chart) -> None:
    values: Values = {"monitoring": {"enabled": True}, "model": {"huggingFace": MODEL}}
    first, second = chart.objects(values), chart.objects(values, "other")
    names = [{(m["kind"], m["metadata"]["name"]) for m in objects} for objects in (first, second)]
    assert not names[0] & names[1]
    text = json.dumps(second)
    assert '"app.kubernetes.io/instance": "pdserve"' not in text
    (subject,) = of_kind(second, "RoleBinding")["other-pdserve-certificates"]["subjects"]
    assert subject["namespace"] == NAMESPACE


BAD_VALUES: tuple[tuple[Values, str], ...] = (
    ({"replicas": 2}, "replicas"),
    ({"gateway": {"replica": 2}}, "replica"),
    ({"gateway": {"replicas": "two"}}, "replicas"),
    ({"decode": {"minReplicas": 0}}, "minReplicas"),
    ({"images": {"worker": {"digest": "sha256:abc"}}}, "digest"),
    ({"certificates": {"source": "vault"}}, "source"),
    ({"certificates": {"days": 0}}, "days"),
    ({"workers": {"device": "tpu"}}, "device"),
    ({"model": {"huggingFace": "org/name"}}, "huggingFace"),
    ({"model": {"huggingFace": "org/name@main"}}, "huggingFace"),
    ({"model": {"huggingFace": MODEL, "path": "/models/x"}}, "model"),
    ({"model": {"image": {"reference": "registry.example.com/x"}}}, "image"),
    ({"model": {"volume": {"accessMode": "ReadOnlyMany"}}}, "accessMode"),
    ({"decode": {"env": {"PDSERVE_THREADS": 2}}}, "env"),
    ({"gatewayApi": {"enabled": True}}, "gatewayApi"),
    ({"gatewayApi": {**GATEWAY_API, "host": ""}}, "gatewayApi"),
    ({"ingress": {"enabled": True}}, "ingress"),
    ({"networkPolicies": {"apiServer": ["10.0.0.0"]}}, "apiServer"),
    ({"fullnameOverride": "Mine"}, "fullnameOverride"),
    ({"apiKeys": {"hashes": "me:sha256:00", "existingSecret": "keys"}}, "existingSecret"),
    ({"monitoring": {"runbookUrl": "docs/runbook.md"}}, "runbookUrl"),
    ({"jobs": {"tolerations": {}}}, "tolerations"),
)


def test_bad_values_are_refused(chart: Chart, subtests: pytest.Subtests) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    validator.check_schema(schema)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert not list(validator.iter_errors(defaults))
    for values, said in BAD_VALUES:
        with subtests.test(values=values):
            errors = list(validator.iter_errors(merged(defaults, values)))
            assert said in "".join(f"{e.json_path} {e.message}" for e in errors)
            with pytest.raises(ValueError, match=said):
                chart.objects(values)


def test_the_schema_has_every_value() -> None:
    """A value without a schema would accept anything."""

    def undescribed(values: Values, schema: Any, where: str) -> Iterator[str]:
        properties = schema.get("properties", {})
        for name, value in values.items():
            if name not in properties:
                yield f"{where}.{name}"
            elif isinstance(value, dict) and value:
                yield from undescribed(value, resolved(properties[name]), f"{where}.{name}")

    def resolved(part: Any) -> Any:
        return schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part

    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    maps = {".requests", ".limits"}  # of resources: any names
    found = [w for w in undescribed(defaults, schema, "") if not any(m in w for m in maps)]
    assert found == []
