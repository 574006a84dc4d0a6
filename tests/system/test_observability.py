"""A running system exports the metrics that boards, alerts, scalers and documents name."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import httpx
import pytest
from oracles.promql import K8S, expressions, family, names
from prometheus_client.parser import text_string_to_metric_families
from systems.fleet import Fleet
from systems.whole import KEY, KEY_SHOWN, MARK, MODEL, WholeSystem

from pdserve.cli.main import main
from pdserve.services.common.auth.certificates import Role

ID = "x-request-id"
DOCS = sorted((K8S.parent / "docs").rglob("*.md"))


def page(url: str, **query: str) -> str:
    answer = httpx.get(url, headers=KEY_SHOWN, params=query, timeout=30)
    return answer.raise_for_status().text


def families(text: str) -> set[str]:
    found = {family.name for family in text_string_to_metric_families(text)}
    return {name for name in found if not name.endswith("_created")}


@pytest.fixture(scope="module", autouse=True)
def rings() -> None:
    """Override the autouse fixture: `system` and `fleet` check their rings themselves."""


@pytest.fixture(scope="module")
def own(system: WholeSystem) -> set[str]:
    """Return the names of the metrics that the processes export about themselves."""
    found = families(page(f"http://{system.http}/metrics", fleet="false"))
    for address in system.metrics.values():
        found |= families(page(f"http://{address}/metrics"))
    return found


def test_boards_and_alerts_use_exported_metrics(own: set[str]) -> None:
    """Excludes the fleet's metrics, which no gateway of a cluster exports."""
    missing = {
        where: lost
        for where, expression in expressions().items()
        if (lost := {n for n in names(expression) if family(n, own) not in own})
    }
    assert missing == {}


def test_scalers_and_documents_use_exported_metrics(own: set[str], system: WholeSystem) -> None:
    fleet = families(page(f"http://{system.http}/metrics", fleet="true"))
    known = own | fleet
    manifests = [*K8S.rglob("*.yaml"), *K8S.rglob("*.yml"), *K8S.rglob("*.json")]
    named = {path: names(path.read_text()) for path in (*manifests, *DOCS)}
    assert sum(map(bool, named.values())) > 10
    for path, found in named.items():
        assert {n for n in found if family(n, known) not in known} == set(), path
    assert "pdserve_prefill_backlog_seconds" in own
    metrics = K8S.parent / "docs/metrics.md"
    documented = {
        line.split("`")[1] for line in metrics.read_text().splitlines() if line[:3] == "| `"
    }
    assert documented <= known
    assert {n for n in fleet | own if n.startswith(("vllm:", "pdserve_"))} <= documented


def test_a_report_is_complete_and_contains_no_secret(fleet: Fleet, tmp_path: Path) -> None:
    """The report contains neither an API key nor a prompt."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": f"{MARK} " * 40, "max_tokens": 2}
    httpx.post(f"{fleet.url}/v1/completions", json=body, headers=KEY_SHOWN, timeout=60)
    out, rings = tmp_path / "report.tar.gz", fleet.options[-1]
    words = ("--url", fleet.url, "--api-key", KEY, "--trace-dir", rings, "--out", str(out))
    assert main(["report", *words]) == 0
    with tarfile.open(out) as archive:
        members = {m.name: archive.extractfile(m) for m in archive}
        files = {name: file.read() for name, file in members.items() if file is not None}
    named = {name.removeprefix("pdserve-report/") for name in files}
    assert {"gateway/metrics.txt", "gateway/fleet_state.json", "gateway/ready.json"} <= named
    assert any(name.startswith("rings/decode-") for name in named)
    logs = {name: data for name, data in files.items() if "/logs/" in name}
    mine = [name for name in logs if b"/v1/" in logs[name] or b"tokens in" in logs[name]]
    assert any(name.endswith("gateway.log") for name in mine), logs.keys()
    assert any(b"api_key: ********" in files[n] for n in files if "/options/up-" in n)
    state = json.loads(files["pdserve-report/gateway/fleet_state.json"])
    assert {worker["role"] for worker in state["workers"]} == {"prefill", "decode"}
    for name, data in files.items():
        for word in (KEY, MARK, MARK.split()[0]):
            assert word.encode() not in data, (name, word)


RUNBOOK = (K8S.parent / "docs/runbook.md").read_text()
ASKS = sorted(set(re.findall(r"^    ((?:curl|pdserve top|pdserve health) .+)$", RUNBOOK, re.M)))


@pytest.mark.parametrize("program", ["curl", "pdserve"])
def test_the_requests_in_the_runbook_succeed(
    program: str, system: WholeSystem, subtests: pytest.Subtests
) -> None:
    """Sends the key that gateways require; with another key every command fails."""
    if program == "curl" and not shutil.which("curl"):
        pytest.skip("NO CURL: the runbook's commands were not tried (Debian: apt install curl)")
    lines = [line for line in ASKS if line.startswith(program)]
    assert lines
    for line in lines:
        with subtests.test(line):
            done = in_shell(line, system, KEY)
            assert (done.returncode, done.stderr) == (0, "")
            silent = "health" in line  # a successful probe prints nothing
            assert bool(done.stdout) == (not silent)
            if "KEY" in line:
                done = in_shell(line, system, "sk-another")
                assert done.returncode
                assert done.stderr


def in_shell(line: str, system: WholeSystem, key: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of the runbook with its placeholders filled in."""
    values = {"GATEWAY:8000": system.http, "ROUTER:50059": system.probes[Role.ROUTER], "KEY": key}
    values |= {"ROUTER:9090": system.metrics[Role.ROUTER]}
    values |= {"WORKER:9090": system.metrics[Role.DECODE]}
    if "/traces/ID" in line:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        url = f"http://{system.http}/v1/completions"
        values["traces/ID"] = "traces/" + httpx.post(url, json=body, headers=KEY_SHOWN).headers[ID]
    for word, value in values.items():
        line = line.replace(word, value)
    line = re.sub("^pdserve", f"{sys.executable} -m pdserve.cli.main", line)
    words = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)
