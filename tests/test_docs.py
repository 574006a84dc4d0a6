"""The documents are true: every path, command, target and signature that they name exists.

tests/test_names.py checks flags, variables, metrics and routes, here and in the deployments.
"""

import ast
import re
from pathlib import Path

import pytest

from pdserve.services.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "kernels/native/simd/README.md",
    "benchmarks/README.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "log.md"),
)
TEXTS = {name: (ROOT / name).read_text() for name in DOCS}
FOLDERS = [p for p in ROOT.iterdir() if p.is_dir() and p.name[0] != "." and p.name != "build"]
EVERYTHING = "\n".join(TEXTS.values())
MAKEFILE = (ROOT / "Makefile").read_text()
LEADING = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/handoff.md")
NOT_OURS = {"tokenizer.json", "config.json", "utils.py"}  # of models, and the one not wanted


def quoted(text: str) -> list[str]:
    """What stands between backquotes on one line."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def exists(path: str, folders: list[Path]) -> bool:
    """Whether the path, or with .py after it, is in one of the folders; `*` and `{a,b}` count."""
    found = re.fullmatch(r"(.*)\{([^}]*)\}(.*)", path)
    if found:
        before, words, after = found.groups()
        return all(exists(before + word.strip() + after, folders) for word in words.split(","))
    names = (path.rstrip("/"), path + ".py")
    return any(any(folder.glob(name)) for folder in folders for name in names)


@pytest.mark.parametrize("name", DOCS)
def test_paths_exist(name: str) -> None:
    text = TEXTS[name]
    tops = "|".join(folder.name for folder in FOLDERS)
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    blocks = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    text = blocks.sub(lambda block: block[2] if block[1] == "python" else "", text)
    named = re.findall(rf"(?<![\w./-])(?:{tops})/[\w./*{{}},-]*[\w*/}}]", text)
    alone = [q for q in quoted(text) if re.fullmatch(r"[\w-]+\.(py|md|json|yml|toml)", q)]
    assert named or linked or name not in LEADING
    missing = [path for path in linked if not (ROOT / name).parent.joinpath(path).exists()]
    missing += [path for path in named if not exists(path, [ROOT])]
    missing += [
        path
        for path in alone
        if path not in NOT_OURS
        and not exists(path, [ROOT])
        and not any(any(folder.rglob(path)) for folder in FOLDERS)
    ]
    assert missing == []


def test_the_modules_in_tables_exist() -> None:
    """Module names that stand in a table without their folder."""
    table = TEXTS["docs/simulation.md"].partition("| module | does |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \|", table, re.MULTILINE)
    modules = [module for row in rows for module in row.split(", ")]
    assert {"clock", "oracle", "sweep"} <= set(modules)
    assert [m for m in modules if not exists(m, [ROOT / "tests/simulation"])] == []


@pytest.mark.parametrize("name", DOCS)
def test_no_line_is_longer_than_a_person_reads(name: str) -> None:
    assert [n for n, line in enumerate(TEXTS[name].splitlines(), 1) if len(line) > 400] == []


def test_the_glossary_is_one_line_a_term() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TEXTS["docs/glossary.md"], re.MULTILINE)[1:]
    terms = [term for term, _ in rows]
    assert 20 <= len(terms) <= 40
    assert terms == sorted(terms, key=str.lower)


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
    assert {"run", "test", "demo", "lint", "type", "setup"} <= named
    assert named <= targets
    told = set(re.findall(r'@echo "make ([a-z -]+?)  ', MAKEFILE))
    assert {word for words in told for word in words.split()} <= targets


def test_commands_exist() -> None:
    named = set(
        re.findall(r"(?<!from )(?<!import )\bpdserve ([a-z|]+)", "\n".join(quoted(EVERYTHING)))
    )
    words = {word for name in named for word in name.split("|")}
    assert {"up", "chat", "gateway", "router", "prefill", "decode"} <= words
    assert words <= {*COMMANDS, "config"}


def test_variables_of_make_exist() -> None:
    given = set(re.findall(r"\b([A-Z_]+)=", "\n".join(re.findall(r"make [^`\n]*", EVERYTHING))))
    assert given == {"ARGS", "TORCH_INDEX"}
    assert given <= set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


def signatures(tree: ast.Module, name: str) -> dict[str, str]:
    """The methods of a class as source: arguments with annotations and defaults, result."""
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return {
        f.name: f"{type(f).__name__} {ast.unparse(f.args)} -> {ast.unparse(f.returns or f.args)}"
        for f in found.body
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def first_sentences(tree: ast.Module, name: str) -> dict[str, str]:
    """The first sentence of each documented method of a class, without its stop."""
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    functions = [f for f in found.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    docs = {f.name: " ".join((ast.get_docstring(f) or "").split()) for f in functions}
    return {method: re.split(r"\.(?: |$)", text)[0] for method, text in docs.items() if text}


def test_signatures_are_those_of_the_code() -> None:
    """And the comment above each is the first sentence of its docstring."""
    checked = 0
    for block in re.findall(r"```python\n(.*?)```", TEXTS["docs/interfaces.md"], re.DOTALL):
        path = block.partition("\n")[0].removeprefix("# ")
        code = ast.parse((ROOT / path).read_text())
        told = ast.parse(block)
        (name,) = (n.name for n in told.body if isinstance(n, ast.ClassDef))
        real, sentences = signatures(code, name), first_sentences(code, name)
        for method, signature in signatures(told, name).items():
            assert real.get(method) == signature, f"{path} {name}.{method}"
            comment = re.search(rf"\n    # (.*)\n    (?:async )?def {method}\(", block)
            assert (comment[1] if comment else None) == sentences.get(method), f"{name}.{method}"
            checked += 1
    assert checked > 40
