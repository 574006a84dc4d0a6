"""Static checks of boards, alerts and monitors: they are complete and use existing metrics and
labels.

tests/system/test_observability.py compares the names with those of a running system.
"""

import re
import subprocess
from pathlib import Path

import metrics_page
import pytest
import yaml
from alerts_page import rules
from builders.manifests import TOGETHER, Manifest, Workload, of_kind, rendered, selects, workloads
from oracles.manifest_rules.labels import WORKERS
from oracles.promql import BOARDS, K8S, expressions, family, labels, names, panels
from oracles.promtool import PROMTOOL, needs_promtool
from scaled_cluster import SCRAPE_S

WIDTH = 24
COMPONENT = yaml.safe_load((K8S / "observability/kustomization.yaml").read_text())
(RUNBOOK,) = re.findall(r"'url=(https://[^']+/runbook\.md)'", str(COMPONENT))


def test_the_parser_finds_metric_and_label_names() -> None:
    text = 'sum by (no, job) (rate(vllm:no_such_total{a="b",c=~"d"}[5m])) / pdserve_none'
    assert names(text) == {"vllm:no_such_total", "pdserve_none"}
    assert [label for _, label in labels(text)] == ["a", "c", "no"]


def test_labels_in_expressions_exist() -> None:
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
        ("config", K8S / "observability/compose/prometheus.yml"),  # includes its alert rules
    ):
        done = subprocess.run([PROMTOOL, "check", check, file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(rule) > 80


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_a_board_has_no_overlapping_panels_or_fixed_data_sources(board: Path) -> None:
    """Every data source is a variable that the reader of the board selects."""
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


def test_an_alert_has_a_severity_a_summary_and_a_runbook_url() -> None:
    assert len(rules()) == 21
    for name, rule in rules().items():
        assert name.startswith("Pdserve")
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert set(rule["annotations"]) == {"summary", "runbook_url"}, name


def test_the_component_has_boards_and_alerts() -> None:
    manifests = rendered("observability")
    (boards,) = of_kind(manifests, "ConfigMap").values()
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert boards["data"] == {path.name: path.read_text() for path in BOARDS}
    (alerts,) = of_kind(manifests, "PrometheusRule").values()
    found = {r["alert"]: r for g in alerts["spec"]["groups"] for r in g["rules"]}
    assert set(found) == {*rules()}
    for name, rule in found.items():
        url, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert url == RUNBOOK, "must be the absolute URL that the component defines once"
        assert anchor == name.lower()


def with_metrics(manifests: list[Manifest]) -> dict[tuple[str, str], str]:
    """Return the metrics port of each container that has one, by pod and container name. A
    gateway's is `http`."""
    found = {}
    for workload in workloads(manifests):
        for container in workload.containers:
            ports = {port["name"] for port in container.get("ports", ())}
            if port := {"metrics", "http"} & ports:
                (found[workload.name, container["name"]],) = port
    return found


@pytest.mark.parametrize("names", [("observability",), *TOGETHER], ids=len)
def test_each_process_is_scraped_exactly_once(names: tuple[str, ...]) -> None:
    """The port exists, the interval is the one the scalers were measured with, and network policies
    allow the scrape. Gateways do not export the fleet's metrics."""
    manifests = rendered(*names)
    processes = with_metrics(manifests)
    scraped = dict.fromkeys(processes, 0)
    for monitor in of_kind(manifests, "PodMonitor").values():
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["interval"] == f"{SCRAPE_S:g}s"
        for workload in workloads(manifests):
            if not selects(monitor["spec"]["selector"], workload.labels):
                continue
            (name,) = (
                c["name"]
                for c in workload.containers
                if endpoint["port"] in {port["name"] for port in c["ports"]}
            )
            assert processes[workload.name, name] == endpoint["port"]
            drops = endpoint.get("metricRelabelings", ())
            assert bool(drops) == (workload.role in WORKERS and name == "pdserve")
            assert ("authorization" in endpoint) == (endpoint["port"] == "http")
            assert reaches(manifests, workload, endpoint["port"])
            scraped[workload.name, name] += 1
    roles = ("gateway", "router", "prefill", "decode")
    assert set(scraped) >= {(f"pdserve-{role}", "pdserve") for role in roles}
    assert set(scraped.values()) == {1}, scraped
    if len(names) > 1:
        assert {("pdserve-decode", "gateway"), ("pdserve-picker", "pdserve")} <= set(scraped)
    for workload in workloads(manifests):
        for container in workload.containers:
            if processes.get((workload.name, container["name"])) == "http":
                env = {entry["name"]: entry.get("value") for entry in container["env"]}
                assert env["PDSERVE_FLEET_METRICS"] == "false"


def reaches(manifests: list[Manifest], workload: Workload, port: str) -> bool:
    """Return whether a network policy admits the namespace `monitoring` to a port."""
    for policy in of_kind(manifests, "NetworkPolicy").values():
        if selects(policy["spec"]["podSelector"], workload.labels):
            for rule in policy["spec"].get("ingress") or ():
                names = [
                    peer.get("namespaceSelector", {}).get("matchLabels", {}).values()
                    for peer in rule.get("from", ())
                ]
                everybody = "from" not in rule
                if port in [p["port"] for p in rule["ports"]] and (
                    everybody or any("monitoring" in name for name in names)
                ):
                    return True
    return False
