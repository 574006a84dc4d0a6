"""The output of `kubectl kustomize` for every kustomization under k8s/, and a view of it for
rules.

The kustomizations are rendered from a copy in which k8s/pin.py has written invented digests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "k8s"
PINNED = ("overlays/release",)
UNDER_COMPONENTS = "overlays/cpu"
# Components that can be combined, in an order that the comments at their top allow.
TOGETHER = (
    ("components/inference-gateway", "observability", "components/inference-gateway/monitors"),
    (
        "components/inference-gateway",
        "components/database",
        "components/endpoint-slices",
        "components/autoscaling",
        "components/model-volume",
        "observability",
        "components/inference-gateway/monitors",
    ),
)
NO_KUBECTL = "NO KUBECTL: the manifests were not rendered and nothing about them is known"
Manifest = dict[str, Any]


def kustomizations() -> list[str]:
    """Return folders of k8s/ that can be applied; a component is applied on top of the overlay
    cpu. Folders inside the base or an overlay are a part of it.
    """
    found = (path.parent for path in SOURCES.rglob("kustomization.yaml"))
    names = sorted(str(path.relative_to(SOURCES)) for path in found)
    return [n for n in names if n.count("/") <= (0 if n.startswith("base") else 1)]


@cache
def _copy() -> tempfile.TemporaryDirectory[str]:
    """Copy k8s/ with digests; the folder is removed with the process."""
    folder = tempfile.TemporaryDirectory()
    shutil.copytree(SOURCES, folder.name, dirs_exist_ok=True)
    names = [f"registry.example.com/{n}@sha256:{d * 64}" for n, d in _digests().items()]
    subprocess.run([sys.executable, Path(folder.name) / "pin.py", *names], check=True)
    return folder


def _digests() -> dict[str, str]:
    return {"pdserve-control": "a", "pdserve-worker": "b"}


@cache
def _rendered(*names: str, under: str, namespace: str) -> list[Manifest]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip(NO_KUBECTL)
    folder = Path(_copy().name)
    path = folder / names[0]
    if yaml.safe_load((path / "kustomization.yaml").read_text())["kind"] == "Component":
        path = Path(tempfile.mkdtemp(dir=folder))
        wanted = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(folder / under, path)],
            "components": [os.path.relpath(folder / name, path) for name in names],
        }
        wanted |= {"namespace": namespace} if namespace else {}
        (path / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
    done = subprocess.run([kubectl, "kustomize", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def parsed(text: str) -> list[Manifest]:
    """Return the objects in YAML documents."""
    # PyYAML's own parser is several times slower than libyaml's, which its wheels contain.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [manifest for manifest in yaml.load_all(text, loader) if manifest]


def rendered(*names: str, under: str = UNDER_COMPONENTS, namespace: str = "") -> list[Manifest]:
    """Return the objects of an overlay, or of components in this order `under` an overlay; a fresh
    copy. Skips the test if kubectl is missing.
    """
    return deepcopy(_rendered(*names, under=under, namespace=namespace))


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    """Return objects by name."""
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] in kinds}


@dataclass(frozen=True)
class Workload:
    """An object that makes pods from one template."""

    name: str
    kind: str
    manifest: Manifest
    template: Manifest
    ends: bool  # its pods end by themselves

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def role(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def pod(self) -> Manifest:
        found: Manifest = self.template["spec"]
        return found

    @property
    def containers(self) -> list[Manifest]:
        """Return containers that serve, or do the job."""
        found: list[Manifest] = self.pod["containers"]
        return found

    @property
    def every_container(self) -> list[Manifest]:
        return [*self.pod.get("initContainers", []), *self.containers]

    def environment(self) -> dict[str, Manifest]:
        """Return variables of its containers, without init containers."""
        return {e["name"]: e for c in self.containers for e in c.get("env", [])}

    def number(self, variable: str) -> float | None:
        entry = self.environment().get(variable)
        return None if entry is None else float(entry["value"])


def workloads(manifests: list[Manifest]) -> list[Workload]:
    """Return every pod template."""
    return [workload for manifest in manifests for workload in _templates(manifest)]


def _templates(manifest: Manifest) -> Iterator[Workload]:
    name, kind, spec = manifest["metadata"]["name"], manifest["kind"], manifest.get("spec", {})
    if kind in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
        yield Workload(name, kind, manifest, spec["template"], kind == "Job")
    elif kind == "CronJob":
        yield Workload(name, kind, manifest, spec["jobTemplate"]["spec"]["template"], True)
    elif kind == "LeaderWorkerSet":
        for which in ("leaderTemplate", "workerTemplate"):
            template = spec["leaderWorkerTemplate"][which]
            yield Workload(f"{name} ({which})", kind, manifest, template, False)


def selects(selector: Manifest | None, labels: dict[str, str]) -> bool:
    """Return whether a label selector (matchLabels, matchExpressions) matches."""
    selector = selector or {}
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for expression in selector.get("matchExpressions", []):
        value, values = labels.get(expression["key"]), expression.get("values", [])
        matches = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not matches[expression["operator"]]:
            return False
    return True
