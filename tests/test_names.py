"""Flags, variables, metrics and routes: what the documents and the deployments name is in the code,
and what is in the code is documented."""

import re
from pathlib import Path
from typing import Any

import alerts_page
import flags_page
import metrics_page
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from served_gateway import served_gateway
from starlette.types import ASGIApp

from pdserve.gateway.http.app import create_app
from pdserve.services.cli.chat.repl import COMMANDS as CHAT_COMMANDS
from pdserve.services.cli.commands import COMMANDS
from pdserve.services.options.aliases import ALIASES
from pdserve.services.options.options import Option
from pdserve.services.options.sources import CONFIG_ENV

ROOT = Path(__file__).parents[1]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks/README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "log.md"),
]
COMPOSE = sorted((*ROOT.glob("docker-compose*.yml"), ROOT / "compose.ha.yml"))
DEPLOYMENTS = [*COMPOSE, *sorted((ROOT / "k8s").rglob("*.yaml"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in (*DOCS, *DEPLOYMENTS)}
DOCUMENTS = "\n".join(path.read_text() for path in DOCS)
# They name metrics, too: what a check looks for must be there.
READERS = ("services/cli", "benchmarks", "tests/support", "tests/system")

OPTIONS: dict[str, Option] = {
    flag: option
    for command in COMMANDS.values()
    for section in command.sections()
    for option in section.options
    for flag in (option.flag, *([f"--no-{option.flag[2:]}"] if option.kind is bool else []))
}
VARIABLES = {option.env for option in OPTIONS.values()} | {CONFIG_ENV}
# Flags of pdserve that are no option, then those of docker, kubectl and curl.
OTHER_FLAGS = {
    "--help",
    "--config",
    "--version",
    "--build",
    "--from-file",
    "--from-literal",
    "--build-arg",
    "--tail",
    "--target",
    "--replicas",
    "--for",
    "--fail-with-body",
    "--no-color",
    "--prefix",
    "--all-containers",
    "--overwrite",
    "--model-server-metrics-port",
}
SCRIPT_FLAGS = {
    flag
    for folder in ("tests/simulation", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    for flag in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', path.read_text())
}
FLAG = re.compile(r"(?<![\w-])--[a-z](?:[a-z0-9-]*[a-z0-9])?")
VARIABLE = re.compile(r"PDSERVE_[A-Z_]*[A-Z]")
METRIC = re.compile(r"(?:vllm:|\bpdserve_)[a-z][a-z_]+[a-z]\b(?![\w/.=:-])")
SAMPLE = re.compile(r"_(total|bucket|sum|count)$")
PATH = re.compile(r"(?:(?<=[\s`\"'(])|(?<=:\d{4}))/[a-z][\w.{}/-]*")
ROUTE = re.compile(r"\b(?:GET|POST|DELETE) (/[^\s|`]*)")
PROXY = "/llm"  # an example of a root path
FOLDERS = (
    PROXY,
    "/dev",
    "/etc",
    "/haproxy.cfg",
    "/home",
    "/models",
    "/run",
    "/srv",
    "/tmp",
    "/var",
    "/spec",  # of JSON patches
)


def test_what_is_looked_for_is_found() -> None:
    text = """`--no-such` and `--w X`, PDSERVE_NO_SUCH=1, vllm:no_such_total{a="b"}, `pdserve_none`,
    curl http://127.0.0.1:8000/none, `GET /v1/no/{name}`, (`/such`) path: /none_too, GET /b | x"""
    assert FLAG.findall(text) == ["--no-such", "--w"]
    assert VARIABLE.findall(text) == ["PDSERVE_NO_SUCH"]
    assert METRIC.findall(text) == ["vllm:no_such_total", "pdserve_none"]
    assert PATH.findall(text) == ["/none", "/v1/no/{name}", "/such", "/none_too", "/b"]
    assert ROUTE.findall(text) == ["/v1/no/{name}", "/b"]


def test_the_pages_are_as_the_code() -> None:
    for page in (flags_page, metrics_page):
        name = page.__name__.removesuffix("_page")
        text = (ROOT / f"docs/{name}.md").read_text()
        assert page.page() == text, f"`make docs` writes docs/{name}.md anew"
    alerts = (ROOT / "k8s/observability/compose/alerts.yml").read_text()
    assert alerts_page.page() == alerts, "`make docs` writes the alerts of compose anew"


@pytest.mark.parametrize("name", TEXTS)
def test_flags_exist(name: str) -> None:
    known = {*OPTIONS, *ALIASES, *OTHER_FLAGS, *SCRIPT_FLAGS}
    assert set(FLAG.findall(TEXTS[name])) - known == set()


def test_flags_and_variables_are_documented() -> None:
    page = TEXTS["docs/flags.md"]
    flags, variables = set(FLAG.findall(page)), set(VARIABLE.findall(page))
    negatives = {flag for flag, option in OPTIONS.items() if flag != option.flag}
    assert OPTIONS.keys() - negatives <= flags
    assert variables == VARIABLES
    assert set(ALIASES) <= set(FLAG.findall(TEXTS["docs/options.md"]))


@pytest.mark.parametrize("name", TEXTS)
def test_variables_exist(name: str) -> None:
    """A compose file may also ask for variables that only it reads."""
    read = {found for path in COMPOSE for found in re.findall(r"\$\{(\w+)", path.read_text())}
    assert set(VARIABLE.findall(TEXTS[name])) - VARIABLES <= read


def test_metrics_exist() -> None:
    read = [path for folder in READERS for path in (ROOT / folder).rglob("*.py")]
    texts = {**TEXTS, **{str(path.relative_to(ROOT)): path.read_text() for path in read}}
    known = metrics_page.names()
    unknown = [
        f"{name} speaks of {metric}"
        for name, text in texts.items()
        for metric in METRIC.findall(text)
        if not {metric, SAMPLE.sub("", metric)} & known
    ]
    assert unknown == []
    assert "pdserve_transfer_bytes" in DOCUMENTS


def test_metrics_are_documented() -> None:
    """Also those of a collector that the page would not know."""
    page = set(re.findall(r"^\| `([\w:]+)` \|", TEXTS["docs/metrics.md"], re.MULTILINE))
    assert page == metrics_page.names()
    made = re.compile(r'"((?:vllm:|pdserve_)[a-z_]+)"')
    sources = [path for folder in ("gateway", "services") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in sources for name in made.findall(path.read_text())}
    assert len(named) > 50
    assert {SAMPLE.sub("", name) for name in named} <= page


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths of a whole gateway, as /v1/models/{name}."""
    apps: list[FastAPI] = []

    def create(*args: Any, routes: FastAPI, **more: Any) -> ASGIApp:
        apps.append(routes)
        return create_app(*args, routes=routes, **more)

    monkeypatch.setattr("served_gateway.create_app", create)
    with served_gateway():
        (app,) = apps
    return {r.path.replace(":path}", "}") for r in app.routes if isinstance(r, APIRoute)}


def test_routes_exist_and_are_documented(routes: set[str]) -> None:
    assert {"/ready", "/openapi.json", "/v1/files/{file_id}/content"} <= routes
    assert routes - {path for text in TEXTS.values() for path in ROUTE.findall(text)} == set()
    prefixes = {path[: at.start()] for path in routes for at in re.finditer("/", path)}
    known = [re.sub(r"\{\w+\}", "[^/]+", path) for path in routes | prefixes]
    unknown = {
        f"{name} speaks of {path}"
        for name, text in TEXTS.items()
        for path in {found.rstrip("./") for found in PATH.findall(text)}
        if not path.startswith((*FOLDERS, *CHAT_COMMANDS)) and not path.endswith(".py")
        if not any(re.fullmatch(one, path) for one in known)
    }
    assert unknown == set()
