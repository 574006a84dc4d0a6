"""Strict schemas of the objects under k8s/: an unknown field is an error.

Kubernetes' own kinds come from kubernetes-validate; KEDA's, cert-manager's and the Prometheus
operator's from cloudcoil's models, by sending an object through them and comparing the result; the
Gateway API's from the npm package @kubernetes-models/gateway-api, which `make setup` packs into
build/. No package has those of LeaderWorkerSet and of the Inference Extension: their fields are
listed here, after their published reference.
"""

import json
import tarfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from pydantic import ValidationError

ROOT = Path(__file__).parents[3]
KUBERNETES = "1.37"
MODELS = {
    "keda.sh/v1alpha1": "keda.v1alpha1",
    "cert-manager.io/v1": "cert_manager.v1",
    "monitoring.coreos.com/v1": "prometheus_operator.v1",
}
GATEWAY_API = "gateway.networking.k8s.io"
GATEWAY_API_FILE = ROOT / "build/kubernetes-models-gateway-api-0.5.1.tgz"
# GRPCRoute became v1 unchanged from v1alpha2, the version in the package.
OLDER = {("v1", "GRPCRoute"): "v1alpha2"}

TEMPLATE = object()  # a pod template
SCALE = (int, str)
TEXTS = {str: str}  # any keys
# Fields by kind: a type, a tuple of types, a set of words, a dict of fields, or a list of one of
# them. "!" after a name: it is required.
LISTED: dict[tuple[str, str], dict[str, Any]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int,
        "startupPolicy": {"LeaderCreated", "LeaderReady"},
        "networkConfig": {"subdomainPolicy!": {"Shared", "UniquePerReplica"}},
        "rolloutStrategy": {
            "type!": {"RollingUpdate"},
            "rollingUpdateConfiguration": {
                "maxSurge": SCALE,
                "maxUnavailable": SCALE,
                "partition": int,
            },
        },
        "leaderWorkerTemplate!": {
            "leaderTemplate": TEMPLATE,
            "workerTemplate!": TEMPLATE,
            "size": int,
            "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
            "subGroupPolicy": {
                "subGroupSize": int,
                "subGroupPolicyType": {"LeaderWorker", "LeaderExcluded"},
            },
        },
    },
    ("inference.networking.k8s.io/v1", "InferencePool"): {
        "appProtocol": {"http", "kubernetes.io/h2c"},
        "selector!": {"matchLabels!": TEXTS},
        "targetPorts!": [{"number!": int}],
        "endpointPickerRef": {
            "group": str,
            "kind": str,
            "name!": str,
            "port": {"number!": int},
            "failureMode": {"FailOpen", "FailClose"},
        },
    },
    ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"): {
        "priority": int,
        "poolRef!": {"group": str, "kind": str, "name!": str},
    },
}


def errors(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object according to its schema."""
    return list(_errors(json.dumps(manifest)))


@cache  # many kustomizations have the same objects
def _errors(text: str) -> list[str]:
    manifest = json.loads(text)
    api, kind = manifest["apiVersion"], manifest["kind"]
    if api in MODELS:
        return list(_of_model(manifest))
    if api.partition("/")[0] == GATEWAY_API:
        return [*_of_gateway_api(manifest), *_of_metadata(manifest)]
    if (api, kind) in LISTED:
        known = {"apiVersion", "kind", "metadata", "spec"}
        unknown = [f"unknown field {name}" for name in manifest.keys() - known]
        spec = _listed(manifest.get("spec"), LISTED[api, kind], "spec")
        return [*unknown, *spec, *_of_metadata(manifest)]
    if "." in api.partition("/")[0] and not api.partition("/")[0].endswith(".k8s.io"):
        return [f"no schema of {api} {kind}"]
    return list(_of_kubernetes(manifest))


def _of_kubernetes(manifest: dict[str, Any]) -> Iterator[str]:
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield str(error.message)
    except kubernetes_validate.SchemaNotFoundError as error:
        yield str(error)


def _of_metadata(manifest: dict[str, Any]) -> Iterator[str]:
    same = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]}
    yield from _of_kubernetes(same)


def _of_model(manifest: dict[str, Any]) -> Iterator[str]:
    module = import_module(f"cloudcoil.models.{MODELS[manifest['apiVersion']]}")
    model = getattr(module, manifest["kind"], None)
    if model is None:
        yield f"no kind {manifest['kind']}"
        return
    try:
        read = model.model_validate(manifest, strict=False)
    except ValidationError as error:
        yield from (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return
    back = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    yield from _lost(manifest, back, "")


def _lost(given: Any, back: Any, where: str) -> Iterator[str]:
    """Return what a model did not keep: it has no such field, or another type for it."""
    if isinstance(given, dict) and isinstance(back, dict):
        for name, value in given.items():
            if name not in back:
                yield f"{where}: unknown field {name}"
            else:
                yield from _lost(value, back[name], f"{where}.{name}")
    elif isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        for index, pair in enumerate(zip(given, back, strict=True)):
            yield from _lost(*pair, f"{where}[{index}]")
    elif given != back:
        yield f"{where}: {given!r} is read as {back!r}"


def has_gateway_api() -> bool:
    """Return whether the schemas of the Gateway API are installed."""
    return GATEWAY_API_FILE.exists()


@cache
def _gateway_schema(version: str, kind: str) -> dict[str, Any]:
    """Return a schema from the package's JavaScript: an object in JSON."""
    with tarfile.open(GATEWAY_API_FILE) as package:
        member = package.extractfile(f"package/{GATEWAY_API}/{version}/{kind}.js")
        assert member is not None
        text = member.read().decode()
    begin = text.index("{", text.index("const schema = "))
    schema: dict[str, Any] = json.JSONDecoder().raw_decode(text[begin:])[0]
    del schema["properties"]["metadata"]  # a reference to another package
    return schema


def _of_gateway_api(manifest: dict[str, Any]) -> Iterator[str]:
    kind, version = manifest["kind"], manifest["apiVersion"].partition("/")[2]
    older = OLDER.get((version, kind), version)
    schema = _gateway_schema(older, kind)
    given = {**manifest, "apiVersion": f"{GATEWAY_API}/{older}"}
    del given["metadata"]
    for error in jsonschema.Draft7Validator(schema).iter_errors(given):
        yield f"{error.json_path}: {error.message}"
    yield from _unknown(given, schema, "")


def _unknown(given: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Return fields that a schema does not have; the keys of a map are not fields."""
    if isinstance(given, dict) and "properties" in schema:
        for name, value in given.items():
            if name not in schema["properties"]:
                yield f"{where}: unknown field {name}"
            else:
                yield from _unknown(value, schema["properties"][name], f"{where}.{name}")
    elif isinstance(given, list) and "items" in schema:
        for index, value in enumerate(given):
            yield from _unknown(value, schema["items"], f"{where}[{index}]")


def _listed(given: Any, wanted: Any, where: str) -> Iterator[str]:
    """Compare an object with a list of fields."""
    if wanted is TEMPLATE:
        # It may have no name; a pod template is that of a Deployment.
        same = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}}
        spec = {"selector": {"matchLabels": {}}, "template": given}
        yield from (f"{where}: {text}" for text in _of_kubernetes({**same, "spec": spec}))
    elif wanted is TEXTS:
        if not isinstance(given, dict) or any(not isinstance(v, str) for v in given.values()):
            yield f"{where}: {given!r} is no map of texts"
    elif isinstance(wanted, dict):
        if not isinstance(given, dict):
            yield f"{where}: {given!r} is no object"
            return
        fields = {name.removesuffix("!"): field for name, field in wanted.items()}
        yield from (f"{where}: unknown field {name}" for name in given.keys() - fields.keys())
        missing = {n[:-1] for n in wanted if n.endswith("!")} - given.keys()
        yield from (f"{where}: no {name}" for name in sorted(missing))
        for name in fields.keys() & given.keys():
            yield from _listed(given[name], fields[name], f"{where}.{name}")
    elif isinstance(wanted, list):
        if not isinstance(given, list):
            yield f"{where}: {given!r} is no list"
            return
        for index, value in enumerate(given):
            yield from _listed(value, wanted[0], f"{where}[{index}]")
    elif isinstance(wanted, set):
        if given not in wanted:
            yield f"{where}: {given!r} is none of {sorted(wanted)}"
    elif not isinstance(given, wanted) or isinstance(given, bool):
        yield f"{where}: {given!r} has the wrong type"
