"""The Helm chart in k8s/helm, rendered by Helm's Go library in a separate process."""

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from builders.manifests import Manifest, parsed

CHART = Path(__file__).parents[3] / "k8s/helm"
RELEASE, NAMESPACE = "pdserve", "llm"
Values = dict[str, Any]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac"
GATEWAY_API = {
    "enabled": True,
    "className": "example",
    "host": "llm.example.com",
    "grpcHost": "grpc.llm.example.com",
    "issuer": {"name": "letsencrypt"},
}
# Values for what no kustomization has.
EXAMPLES: dict[str, Values] = {
    "default": {},
    "ingress": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "llm.example.com",
            "tlsSecret": "tls",
        }
    },
    "many": {
        "fullnameOverride": "pdserve-other",
        "images": {"control": {"digest": "sha256:" + "a" * 64}, "pullSecrets": ["registry"]},
        "apiKeys": {"hashes": "me:sha256:00\n"},
        "autoscaling": {"control": False, "workers": True},
        "decode": {
            "env": {
                "PDSERVE_ENCRYPT_KV": "true",
                "PDSERVE_THREADS": "2",
                "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
            },
            "resources": {
                "requests": {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Gi"},
                "limits": {"memory": "2Gi", "ephemeral-storage": "1Gi"},
            },
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "batch", "operator": "Exists"}],
        },
        "gateway": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
        "model": {
            "huggingFace": MODEL,
            "volume": {"storageClassName": "fast", "accessMode": "ReadWriteOnce", "size": "5Gi"},
        },
        "gatewayApi": GATEWAY_API,
        "monitoring": {"enabled": True},
        "database": {"existingSecret": "db"},
        "serviceAccount": {"create": True, "annotations": {"a": "b"}},
        "jobs": {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}]},
    },
    "kind": yaml.safe_load((CHART / "kind.yaml").read_text()),
}


class Chart:
    """The chart; Helm's library stays in the process of `pool`. What it has rendered is kept."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._rendered: dict[tuple[str, str], dict[str, str]] = {}  # by values and release

    def texts(self, values: Values | None = None, release: str = RELEASE) -> dict[str, str]:
        """Return what each template renders, by its file name. Raises ValueError if Helm refuses
        the values."""
        text = json.dumps(values or {})
        if (text, release) not in self._rendered:
            self._rendered[text, release] = self._pool.submit(_render, text, release).result()
        return self._rendered[text, release]

    def objects(self, values: Values | None = None, release: str = RELEASE) -> list[Manifest]:
        """Return the objects that Helm applies, those of hooks included."""
        texts = self.texts(values, release).items()
        yamls = [text for name, text in texts if name.endswith(".yaml")]
        return [m for text in yamls for m in parsed(text)]

    def lint(self, values: Values | None = None) -> list[str]:
        """Return what `helm lint` reports, from warnings up."""
        return self._pool.submit(_lint, json.dumps(values or {})).result()


@contextmanager
def loaded_chart() -> Iterator[Chart]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield Chart(pool)


def is_hook(manifest: Manifest) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def _render(values: str, release: str) -> dict[str, str]:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        try:
            found: dict[str, str] = chart.render(
                json.loads(values), name=release, namespace=NAMESPACE
            )
        except helm_python.HelmError as error:
            raise ValueError(str(error)) from None
    return {name.rpartition("/")[2]: text for name, text in found.items()}


def _lint(values: str) -> list[str]:
    import helm_python

    report = helm_python.lint(CHART, json.loads(values), strict=True)
    warning = 2
    said = [m["error"] for m in report["messages"] if m["severity"] >= warning]
    return [*said, *report["errors"]]
