"""The commands in README, CONTRIBUTING and docs are correct: pdserve's parsers accept them, targets
of make exist, a gateway answers the requests, Python's imports succeed, YAML has known fields.

What this cannot check has a comment right before its block (oracles/doc_blocks.py). Commands of
docs/runbook.md are tested in tests/k8s/observability/test_runbook.py and tests/system.
"""

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import httpx
import pytest
import yaml
from fakes.router import FakeRouter, saying
from oracles.command_lines import meaning
from oracles.doc_blocks import PAGES, ROOT, Block, blocks, prose
from oracles.manifest_schemas import errors
from systems.served_gateway import served_gateway

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
ADDRESS = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000(/.*)")
INDENTED = re.compile(r"^ {4,}(?:pdserve|curl|make|kubectl|docker|helm) ", re.MULTILINE)
BODY = {"messages": [{"role": "user", "content": "hi"}]}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
FILES = {"requests.jsonl": json.dumps(LINE).encode()}
OVERLAY = ROOT / "k8s/overlays/yours"  # where readers put a kustomization


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command, without comments, redirections and variables set
    before it. Raises ValueError for a quote that does not end."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        try:
            words = _words(pending)
        except ValueError:  # the quote ends on a later line
            continue
        pending = ""
        yield from _simple(words)
    if pending:
        raise ValueError(f"no end of the quote in {pending!r}")


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _simple(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    redirects = False
    for word in (*words, ";"):
        if word and set(word) <= set("<>"):
            redirects = True
        elif redirects:
            redirects = False
        elif word and set(word) <= set("();|&"):
            if command:
                yield command
            command = []
        elif command or not re.match(r"\w+=", word):
            command.append(word)


class Gateway:
    """A running gateway, to which the curl commands of a block are sent. A file id with `...` is
    that of the file uploaded last."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._file_id = ""

    def curl(self, words: list[str]) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("url")
        parser.add_argument("-X", default="")
        parser.add_argument("-d")
        for flag in ("-H", "-F"):
            parser.add_argument(flag, action="append", default=[])
        given = parser.parse_args(words)
        found = ADDRESS.fullmatch(given.url)
        assert found, f"{given.url} is not an address of pdserve up"
        headers = dict(header.split(": ", 1) for header in given.H)
        if "Authorization" in headers:
            headers["Authorization"] = headers["Authorization"].replace("KEY", "operator")
        fields = dict(field.split("=", 1) for field in given.F)
        reply = httpx.request(
            given.X or ("POST" if given.F or given.d else "GET"),
            self._url + found[1],
            headers=headers,
            content=given.d and given.d.replace("file-...", self._file_id),
            data={name: value for name, value in fields.items() if value[0] != "@"},
            files={
                name: (value[1:], FILES[value[1:]])
                for name, value in fields.items()
                if value[0] == "@"
            },
        )
        assert reply.is_success, f"{reply.status_code}: {reply.text}"
        if given.F:
            self._file_id = reply.json()["id"]


def check_pdserve(words: list[str]) -> None:
    meaning(words)


def check_make(words: list[str]) -> None:
    names = [word for word in words if "=" not in word]
    assert names
    assert set(names) <= TARGETS, f"no target of make: {sorted(set(names) - TARGETS)}"


def check_shell(block: Block, gateway: Gateway) -> None:
    """Check each command that it knows. The others need a comment, and a comment needs others."""
    checks: dict[str, Callable[[list[str]], None]] = {
        "pdserve": check_pdserve,
        "make": check_make,
        "export": lambda words: None,  # tests/test_docs.py checks the names of variables
        "curl": gateway.curl,
    }
    unknown = set()
    for words in commands(block.text):
        program = Path(words[0]).name
        if program in checks:
            checks[program](words[1:])
            continue
        unknown.add(program)
        if "exec" in words and "pdserve" in words:  # in a container
            check_pdserve(words[words.index("pdserve") + 1 :])
    marked = block.not_run or block.run_by
    assert marked or not unknown, f"say why no test runs {sorted(unknown)}: `<!-- not run: ... -->`"
    assert unknown or not marked, "the comment is not needed: every command is checked"


def check_python(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    import_module(f"{node.module}.{alias.name}")


def check_yaml(block: Block) -> None:
    for document in yaml.safe_load_all(block.text):
        if block.not_run or block.run_by:
            continue
        assert "kind" in document, "say why no test reads it: `<!-- not run: ... -->`"
        if document["kind"] == "Kustomization":
            paths = document["resources"] + document.get("components", [])
            missing = [path for path in paths if not OVERLAY.joinpath(path).resolve().exists()]
            assert not missing, f"no such path: {missing}"
        else:
            found = errors(document)
            assert not found, f"not in its schema: {found}"


def only_tiny() -> FakeRouter:
    return FakeRouter(saying("hello world"))


def check(block: Block, gateway: Gateway) -> None:
    checks: dict[str, Callable[[], object]] = {
        **dict.fromkeys(("sh", "bash", "console"), lambda: check_shell(block, gateway)),
        "python": lambda: check_python(block),
        "yaml": lambda: check_yaml(block),
        "json": lambda: json.loads(block.text),
        "toml": lambda: tomllib.loads(block.text),
        "": lambda: None,  # output, and drawings
    }
    if block.run_by:
        assert Path(block.page).name in (ROOT / block.run_by).read_text()
    checks[block.language]()


def test_blocks_are_correct_or_marked(subtests: pytest.Subtests) -> None:
    found = list(blocks())
    assert len(found) > 40
    fences = sum(
        line.strip().startswith("```") for p in PAGES for line in p.read_text().splitlines()
    )
    assert fences == 2 * len(found), "a fence is indented, or has more than a language after it"
    assert [page for page, text in prose() if INDENTED.search(text)] == ["docs/runbook.md"]
    with served_gateway(only_tiny) as url:
        gateway = Gateway(url)
        for block in found:
            with subtests.test(str(block)):
                check(block, gateway)


def test_command_lines_within_sentences_are_correct(subtests: pytest.Subtests) -> None:
    """Covers those with arguments; tests/test_docs.py has the names of commands."""
    found = [
        (page, shlex.split(line.replace(r"\|", "|")))
        for page, text in prose()
        for line in re.findall(r"`pdserve ([^`]+)`", text)
    ]
    lines = [(page, words) for page, words in found if len(words) > 1 and words[0] != "config"]
    assert len(lines) > 20
    for page, words in lines:
        if words[-1] != "--help":
            with subtests.test(f"{page}: {shlex.join(words)}"):
                meaning(["1" if word == "N" else word for word in words])


def test_the_checks_find_what_is_wrong(subtests: pytest.Subtests) -> None:
    chat = "curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json'"
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {port: 1}"
    cases = {
        "pdserve up --no-such-flag 1": ("sh", "option --no-such-flag is unknown"),
        "pdserve up --port http": ("sh", "'http' is not a whole number"),
        "echo; .venv/bin/pdserve nothing": ("sh", "command 'nothing' is unknown"),
        "make nothing": ("sh", "no target of make"),
        "kubectl get pods": ("sh", r"say why no test runs \['kubectl'\]"),
        "curl localhost:8000/v1/nothing": ("sh", "404: .*unknown URL"),
        "curl -X DELETE localhost:8000/v1/chat/completions": ("sh", "405: .*method not allowed"),
        chat + " -d '{\"messages\": 1}'": ("sh", "400: .*messages"),
        "curl example.com:8000/v1/models": ("sh", "is not an address of pdserve up"),
        "curl 'localhost:8000": ("sh", "no end of the quote"),
        "import no_such_module": ("python", "No module named 'no_such_module'"),
        "from json import nothing": ("python", "No module named 'json.nothing'"),
        "print(": ("python", "was never closed"),
        "kind: Kustomization\nresources: [../../nothing]": ("yaml", "no such path"),
        "a: b": ("yaml", "say why no test reads it"),
        service: ("yaml", "not in its schema"),
    }
    with served_gateway(only_tiny) as url:
        for text, (language, message) in cases.items():
            block = Block("docs/x.md", 1, language, text + "\n", "", "")
            with subtests.test(text), pytest.raises(Exception, match=message):
                check(block, Gateway(url))
        needless = Block("docs/x.md", 1, "sh", "make test\n", "no reason", "")
        with (
            subtests.test("a comment that is not needed"),
            pytest.raises(AssertionError, match="the comment is not needed"),
        ):
            check(needless, Gateway(url))
