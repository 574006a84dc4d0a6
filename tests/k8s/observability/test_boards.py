"""Boards, alerts and monitors as files: whole, and about metrics and labels that there are.

tests/system/test_observability.py asks a running system for the names.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import metrics_page
import pytest
import yaml
from alerts_page import rules
from promql import BOARDS, K8S, expressions, family, labels, names, panels
from promtool import PROMTOOL, needs_promtool

WIDTH = 24
OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{k8s}/overlays/cpu]
components: [{k8s}/observability]
"""
COMPONENT = yaml.safe_load((K8S / "observability/kustomization.yaml").read_text())
(RUNBOOK,) = re.findall(r"'url=(https://[^']+/runbook\.md)'", str(COMPONENT))
Manifest = dict[str, Any]


def test_what_is_looked_for_is_found() -> None:
    text = 'sum by (no, job) (rate(vllm:no_such_total{a="b",c=~"d"}[5m])) / pdserve_none'
    assert names(text) == {"vllm:no_such_total", "pdserve_none"}
    assert [label for _, label in labels(text)] == ["a", "c", "no"]


def test_labels_exist() -> None:
    known: dict[str, set[str]] = {}
    for metric in (m for metrics in metrics_page.exported().values() for m in metrics):
        known.setdefault(metric.name, set()).update(metrics_page.labels(metric))
    checked = 0
    for where, expression in expressions().items():
        for metrics, label in labels(expression):
            of = {family(name, {*known}) for name in metrics if not name.startswith("process_")}
            assert any(label in known[name] for name in of), f"{where}: {label}"
            checked += 1
    assert checked > 80


@needs_promtool()
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rule = [
        {"record": f"x:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions().values())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": rule}]}))
    for check, file in (
        ("rules", path),
        ("config", K8S / "observability/compose/prometheus.yml"),  # with its alerts
    ):
        done = subprocess.run([PROMTOOL, "check", check, file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(rule) > 80


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_a_board_is_whole(board: Path) -> None:
    """No two panels at one place, and no data source but those that the reader chooses."""
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels(board)]
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= WIDTH, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] not in ("row", "text"):
            assert panel["targets"], panel["title"]
            kinds = {"prometheus": "${metrics}", "jaeger": "${traces}"}
            assert panel["datasource"]["uid"] == kinds[panel["datasource"]["type"]]


def test_an_alert_says_how_bad_it_is_and_what_it_means() -> None:
    assert len(rules()) == 20
    for name, rule in rules().items():
        assert name.startswith("Pdserve")
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert set(rule["annotations"]) == {"summary", "runbook_url"}, name


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """An overlay with the component."""
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("NO KUBECTL: the component was not rendered and nothing about it is known")
    folder = tmp_path_factory.mktemp("overlay")
    overlay = OVERLAY.format(k8s=os.path.relpath(K8S, folder))
    (folder / "kustomization.yaml").write_text(overlay)
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def test_the_component_has_boards_and_alerts(rendered: list[Manifest]) -> None:
    (boards,) = of_kind(rendered, "ConfigMap").values()
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert boards["data"] == {path.name: path.read_text() for path in BOARDS}
    (alerts,) = of_kind(rendered, "PrometheusRule").values()
    found = {r["alert"]: r for g in alerts["spec"]["groups"] for r in g["rules"]}
    assert set(found) == {*rules()}
    for name, rule in found.items():
        url, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert url == RUNBOOK, "absolute, by the one literal of the component"
        assert anchor == name.lower()


def test_every_pod_is_scraped_once_for_its_own(rendered: list[Manifest]) -> None:
    """At a port that it has; gateways do not export the fleet."""
    scraped = dict.fromkeys(of_kind(rendered, "Deployment"), 0)
    for monitor in of_kind(rendered, "PodMonitor").values():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for name, deployment in of_kind(rendered, "Deployment").items():
            template = deployment["spec"]["template"]
            if wanted <= template["metadata"]["labels"].items():
                (container,) = template["spec"]["containers"]
                assert endpoint["port"] in {port["name"] for port in container["ports"]}
                drops = endpoint.get("metricRelabelings", ())
                assert bool(drops) == (name in ("pdserve-prefill", "pdserve-decode"))
                assert ("authorization" in endpoint) == (name == "pdserve-gateway")
                scraped[name] += 1
    roles = ("gateway", "router", "prefill", "decode")
    assert scraped == {f"pdserve-{role}": 1 for role in roles}
    gateway = of_kind(rendered, "Deployment")["pdserve-gateway"]["spec"]["template"]["spec"]
    (container,) = gateway["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["PDSERVE_FLEET_METRICS"] == "false"
