"""Which tests run for a mutant: those that execute its line, the most specific first.

coverage.py records the executed lines with a context for each test, including child processes;
durations come from pytest's JUnit file. For code without a record (C++, Triton kernels, code that
only `make test-kernels` runs), the test files that import the module are used, nearest first.
"""

import ast
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from coverage import CoverageData

from mutation.mutants import PRODUCT

DEFAULT_TEST_S = 1.0  # for a test without a record
NEAREST_FILES = 12
CPP_TESTS = (
    "tests/kernels/test_native_linear.py",
    "tests/kernels/test_native_attention.py",
    "tests/kernels/test_native_elementwise.py",
    "tests/kernels/test_native_sampling.py",
    "tests/kernels/test_native_stack.py",
    "tests/kernels/test_native_decoder.py",
    "tests/kernels/test_packed_groups.py",
    "tests/kernels/test_copy_hash.py",
    "tests/kernels/test_routing.py",
    "tests/engine/weights/test_quantize.py",
    "tests/engine/models/test_native_invariance.py",
)


class Selection:
    """The recorded run of a tree's tests."""

    def __init__(self, root: Path, data: Path, junit: Path) -> None:
        self._root = root
        self._data = CoverageData(str(data))
        self._data.read()
        self._seconds = dict(_seconds(root, junit))
        self._importers: dict[str, list[str]] | None = None

    def tests(self, path: str, line: int, budget_s: float) -> tuple[list[str], bool]:
        """Node ids that together take about `budget_s`, and whether they are known to execute the
        line; otherwise they are files that import the module."""
        if path.endswith(".py"):
            chosen = self._executing(path, line, budget_s)
            return (chosen, True) if chosen else (self._nearest(path), False)
        return [test for test in CPP_TESTS if (self._root / test).exists()], False

    def _executing(self, path: str, line: int, budget_s: float) -> list[str]:
        by_line: dict[int, list[str]] = {}
        for file in self._data.measured_files():
            if file.endswith(f"/{path}"):
                by_line = self._data.contexts_by_lineno(file)
        num_lines: dict[str, int] = {}
        for contexts in by_line.values():
            for test in {_node(c) for c in contexts} - {""}:
                num_lines[test] = num_lines.get(test, 0) + 1
        on_line = {_node(context) for context in by_line.get(line, [])} - {""}
        if "" in by_line.get(line, []):  # executed on import, so any test may depend on it
            on_line = set(num_lines)
        by_use = sorted(
            (test for test in on_line if (self._root / test.split("::")[0]).exists()),
            key=lambda test: (-num_lines[test] / (0.05 + self._cost(test)), test),
        )
        chosen: list[str] = []
        left_s = budget_s
        for test in by_use:
            if (cost_s := self._cost(test)) <= left_s or not chosen:
                chosen.append(test)
                left_s -= cost_s
        return chosen

    def _cost(self, test: str) -> float:
        return self._seconds.get(test, DEFAULT_TEST_S)

    def _nearest(self, path: str) -> list[str]:
        """Test files by their distance from the module along imports."""
        if self._importers is None:
            self._importers = _importers(self._root)
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        found: list[str] = []
        seen, front = {f"pdserve.{module}"}, [f"pdserve.{module}"]
        while front and len(found) < NEAREST_FILES:
            reached = sorted({i for name in front for i in self._importers.get(name, [])} - seen)
            seen |= set(reached)
            found += [name for name in reached if name.startswith("tests/")]
            front = [name for name in reached if not name.startswith("tests/")]
        return found[:NEAREST_FILES]


def _node(context: str) -> str:
    """The node id in a context of pytest-cov ("id|run") or of a child process ("id (call)")."""
    if context.endswith(("|run", "|setup", "|teardown")):
        context = context.rpartition("|")[0]
    if context.endswith((" (call)", " (setup)", " (teardown)")):
        context = context.rpartition(" (")[0]
    return context if "::" in context else ""


def _seconds(root: Path, junit: Path) -> Iterator[tuple[str, float]]:
    for case in ET.parse(junit).iter("testcase"):
        words = case.get("classname", "").split(".")
        for end in range(len(words), 0, -1):
            path = "/".join(words[:end]) + ".py"
            if (root / path).exists():
                names = [*words[end:], case.get("name", "")]
                yield "::".join([path, *names]), float(case.get("time", 0))
                break


def _importers(root: Path) -> dict[str, list[str]]:
    """Map each module to the modules that import it; a test file is named by its path."""
    found: dict[str, set[str]] = {}
    names: dict[Path, str] = {}
    for path in (root / "tests").rglob("*.py"):
        if path.name.startswith("test_"):
            names[path] = path.relative_to(root).as_posix()
    for folder in ("tests/support", "tests", "tools/docs", "tools/tables"):  # pytest's pythonpath
        for path in (root / folder).rglob("*.py"):
            if path not in names:
                names[path] = _dotted(path.relative_to(root / folder))
    for folder in PRODUCT:
        for path in (root / folder).rglob("*.py"):
            names[path] = f"pdserve.{_dotted(path.relative_to(root))}"
    for path, name in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            else:
                continue
            for one in imported:
                found.setdefault(one, set()).add(name)
    return {module: sorted(importers) for module, importers in found.items()}


def _dotted(path: Path) -> str:
    return path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
