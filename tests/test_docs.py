"""The documents are correct: names in them exist, and everything that users can name is
documented.

Generated pages are compared with the code.
"""

import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import alerts_page
import flags_page
import metrics_page
import models_page
import other_servers_page
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp
from systems.served_gateway import served_gateway

from pdserve.cli.chat import COMMANDS as CHAT_COMMANDS
from pdserve.cli.commands import COMMANDS
from pdserve.cli.foreign import find_entry
from pdserve.cli.options.options import CONFIG_ENV, Option
from pdserve.engine.architectures import find_spec
from pdserve.gateway.http.app import create_app

ROOT = Path(__file__).parents[1]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks/README.md",
    ROOT / "kernels/native/simd/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMPOSE = sorted((*ROOT.glob("docker-compose*.yml"), ROOT / "compose.ha.yml"))
DEPLOYMENTS = [*COMPOSE, *sorted((ROOT / "k8s").rglob("*.yaml"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in (*DOCS, *DEPLOYMENTS)}
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCS}
EVERYTHING = "\n".join(DOCUMENTS.values())
MAKEFILE = (ROOT / "Makefile").read_text()
FOLDERS = [p for p in ROOT.iterdir() if p.is_dir() and p.name[0] != "." and p.name != "build"]
NOT_OURS = {
    "tokenizer.json",
    "config.json",
    "utils.py",
    "text/event-stream",
}  # not files of this tree
# These name metrics, too: metrics that a check looks for must exist.
READERS = ("cli", "benchmarks", "tests/support", "tests/system", "tools/docs")

OPTIONS: dict[str, Option] = {
    flag: option
    for command in COMMANDS.values()
    for section in command.sections()
    for option in section.options
    for flag in (option.flag, *([f"--no-{option.flag[2:]}"] if option.kind is bool else []))
}
VARIABLES = {option.env for option in OPTIONS.values()} | {CONFIG_ENV}
# Flags of pdserve that are not options, then those of docker, kubectl and curl.
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
    "--rm",
    "--create-namespace",
    "--set",
    "--set-file",
    "--reuse-values",
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
    for folder in ("tests/chaos", "tests/simulation", "benchmarks", "tools")
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
OUTSIDE = (
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


def test_generated_pages_match_the_code(subtests: pytest.Subtests) -> None:
    for page in (flags_page, metrics_page, other_servers_page):
        name = f"docs/{page.__name__.removesuffix('_page').replace('_', '-')}.md"
        with subtests.test(name):
            assert page.page() == TEXTS[name], f"`make docs` writes {name} again"
    with subtests.test("alerts"):
        alerts = (ROOT / "k8s/observability/compose/alerts.yml").read_text()
        assert alerts_page.page() == alerts, "`make docs` writes the alerts of compose again"
    with subtests.test("docs/models.md"):  # in a separate process: other tests add architectures
        program = [sys.executable, str(models_page.__file__)]
        made = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        assert made == TEXTS["docs/models.md"], "`make docs` writes docs/models.md again"


def test_every_architecture_is_on_the_page_of_models(subtests: pytest.Subtests) -> None:
    lines = TEXTS["docs/models.md"].splitlines()
    rows = {line.split(" | ")[-1].strip(" |"): line for line in lines}
    for module in (ROOT / "engine/architectures").glob("[a-z]*.py"):
        with subtests.test(module.name):
            name = rows[module.name].split("`")[1]
            assert name in find_spec({"architectures": [name]}).architectures


# --- paths, targets, commands


def quoted(text: str) -> list[str]:
    """Return the texts between backquotes on one line."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def exists(path: str, folders: list[Path]) -> bool:
    """Return whether the path, or with .py after it, is in one of the folders; `*` and `{a,b}`
    count.
    """
    found = re.fullmatch(r"(.*)\{([^}]*)\}(.*)", path)
    if found:
        before, words, after = found.groups()
        return all(exists(before + word.strip() + after, folders) for word in words.split(","))
    names = (path.rstrip("/"), path + ".py")
    return any(any(folder.glob(name)) for folder in folders for name in names)


def test_links_and_paths_exist(subtests: pytest.Subtests) -> None:
    tops = "|".join(folder.name for folder in FOLDERS)
    path_in_a_folder = re.compile(rf"(?<![\w./-])(?:{tops})/[\w./*{{}},-]*[\w*/}}]")
    block = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for name, text in DOCUMENTS.items():
        with subtests.test(name):
            links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
            missing = [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]
            prose = block.sub(lambda found: found[2] if found[1] == "python" else "", text)
            paths = {*path_in_a_folder.findall(prose)} - NOT_OURS
            missing += [p for p in paths if not exists(p, [ROOT])]
            missing += [
                file
                for file in quoted(prose)
                if re.fullmatch(r"[\w-]+\.(py|md|json|yml|toml)", file)
                and file not in NOT_OURS
                and not exists(file, [ROOT])
                and not any(any(folder.rglob(file)) for folder in FOLDERS)
            ]
            assert missing == []
    assert len(path_in_a_folder.findall(EVERYTHING)) > 100


def test_names_of_functions_exist(subtests: pytest.Subtests) -> None:
    named = re.findall(r"`(pdserve\.[\w.]+:[\w.]+)`", EVERYTHING)
    assert len(named) > 10
    for name in named:
        with subtests.test(name):
            resolve_name(name)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    words = re.sub(r'ARGS="[^"]*"', "", EVERYTHING)
    lines = [q for q in quoted(words.replace("\n", " ")) if q.startswith("make ")]
    lines += re.findall(r"^make [a-z].*", words, re.MULTILINE)
    named = {
        word
        for line in lines
        for word in line.partition("#")[0].split()[1:]
        if re.fullmatch(r"[a-z-]+", word)
    }
    assert {"run", "test", "lint"} <= named
    shown = set(re.findall(r'@echo "make ([a-z -]+?)  ', MAKEFILE))
    assert named | {word for words in shown for word in words.split()} <= targets
    given = set(re.findall(r"\b([A-Z_]+)=", "\n".join(re.findall(r"make [^`\n]*", EVERYTHING))))
    assert "ARGS" in given
    assert given <= set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


def test_commands_exist() -> None:
    named = set(
        re.findall(r"(?<!from )(?<!import )\bpdserve ([a-z|]+)", "\n".join(quoted(EVERYTHING)))
    )
    words = {word for name in named for word in name.split("|")}
    assert {"up", "chat", "gateway", "router", "prefill", "decode"} <= words
    assert words <= {*COMMANDS, "config"}


# --- flags, variables, metrics, routes


def test_metrics_in_checks_are_found() -> None:
    text = """`--no-such` and `--w X`, PDSERVE_NO_SUCH=1, vllm:no_such_total{a="b"}, `pdserve_none`,
    curl http://127.0.0.1:8000/none, `GET /v1/no/{name}`, (`/such`) path: /none_too, GET /b | x"""
    assert FLAG.findall(text) == ["--no-such", "--w"]
    assert VARIABLE.findall(text) == ["PDSERVE_NO_SUCH"]
    assert METRIC.findall(text) == ["vllm:no_such_total", "pdserve_none"]
    assert PATH.findall(text) == ["/none", "/v1/no/{name}", "/such", "/none_too", "/b"]
    assert ROUTE.findall(text) == ["/v1/no/{name}", "/b"]


FOREIGN = "docs/other-servers.md"


def test_flags_and_variables_exist(subtests: pytest.Subtests) -> None:
    """A compose file may also use variables that only it reads."""
    flags = {*OPTIONS, *OTHER_FLAGS, *SCRIPT_FLAGS}
    with_foreign = ("docs/options.md", "docs/terminal.md")
    read = {found for path in COMPOSE for found in re.findall(r"\$\{(\w+)", path.read_text())}
    for name, text in TEXTS.items():
        with subtests.test(name):
            # The page of other servers has patterns of names, too.
            unknown = set() if name == FOREIGN else set(FLAG.findall(text)) - flags
            if name in with_foreign or name.startswith("docs/from-"):
                unknown = {flag for flag in unknown if find_entry(flag) is None}
            assert unknown == set()
            assert set(VARIABLE.findall(text)) - VARIABLES <= read


def test_flags_and_variables_are_documented() -> None:
    page = TEXTS["docs/flags.md"]
    flags, variables = set(FLAG.findall(page)), set(VARIABLE.findall(page))
    negatives = {flag for flag, option in OPTIONS.items() if flag != option.flag}
    assert OPTIONS.keys() - negatives <= flags
    assert variables == VARIABLES


def test_an_option_needs_a_subject_and_a_number_a_unit(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    tables = (
        (flags_page.SUBJECTS, "Tools and MCP", "no subject for --tool-parser"),
        (flags_page.TOOLS, "Load and measurements", "no subject for --endpoint"),
        (flags_page.UNITS, "_rounds", "no unit for --mcp-max-rounds"),
        (flags_page.EXAMPLES, "isq", "examples: ['isq']"),
    )
    for table, key, message in tables:
        with subtests.test(key), monkeypatch.context() as patch:
            patch.delitem(table, key)
            with pytest.raises(ValueError, match=re.escape(message)):
                flags_page.page()
    with monkeypatch.context() as patch, subtests.test("an option that is gone"):
        patch.setitem(flags_page.SUBJECTS, "Of the past", ("gone",))
        with pytest.raises(ValueError, match="gone"):
            flags_page.page()


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
    assert "pdserve_transfer_bytes" in EVERYTHING


def test_metrics_are_documented() -> None:
    """This includes a collector's metrics that the page would not know."""
    page = set(re.findall(r"^\| `([\w:]+)` \|", TEXTS["docs/metrics.md"], re.MULTILINE))
    assert page == metrics_page.names()
    made = re.compile(r'"((?:vllm:|pdserve_)[a-z_]+)"')
    sources = [
        path
        for folder in ("text", "gateway", "services", "cli", "llm")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = {name for path in sources for name in made.findall(path.read_text())}
    assert len(named) > 50
    assert {SAMPLE.sub("", name) for name in named} <= page


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the paths of a whole gateway, in the form /v1/models/{name}."""
    apps: list[FastAPI] = []

    def create(*args: Any, routes: FastAPI, **more: Any) -> ASGIApp:
        apps.append(routes)
        return create_app(*args, routes=routes, **more)

    monkeypatch.setattr("systems.served_gateway.create_app", create)
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
        if not path.startswith((*OUTSIDE, *CHAT_COMMANDS)) and not path.endswith(".py")
        if not any(re.fullmatch(one, path) for one in known)
    }
    assert unknown == set()
