"""Select mutants of the product: which line, which change. The same seed selects the same mutants
as long as their files do not change, whatever happens to other files."""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutation.edits import Edit, apply, cpp_edits, python_edits

PRODUCT = ("text", "gateway", "services", "cli", "llm", "engine", "kernels")
CPP = {".cpp", ".h", ".inl"}
# Parts in which a fault is most expensive: their lines have twice the weight.
AREAS = {
    "scheduler": ("engine/scheduling/",),
    "router": ("services/router/",),
    "hand-off": ("engine/handoff/", "engine/transport/"),
    "tenants": ("services/common/tenants.py", "services/common/rate_limits.py"),
    "auth": ("services/common/auth/",),
    "parsers": ("text/parsing/", "text/tool_parsers/", "text/reasoning.py"),
}
AREA_WEIGHT = 2.0


@dataclass(frozen=True)
class Mutant:
    """One change of one line. `occurrence` distinguishes equal lines of a file, `choice` the
    changes of one line, in the order of `edits`."""

    path: str
    line: str
    occurrence: int
    choice: int
    becomes: str

    @property
    def area(self) -> str:
        return area_of(self.path)


def area_of(path: str) -> str:
    """The name of the part that a file belongs to."""
    for name, prefixes in AREAS.items():
        if path.startswith(prefixes):
            return name
    return "C++" if Path(path).suffix in CPP else "other"


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Draw mutants of distinct lines by weight without replacement: the largest u ** (1 / weight)
    (Efraimidis and Spirakis, 2006), with u from a hash of seed, file and line."""
    keyed = []
    for path in _sources(root):
        name = path.relative_to(root).as_posix()
        weight = AREA_WEIGHT if area_of(name) in AREAS else 1.0
        for lines in edited_lines(path):
            key = _unit(seed, name, lines.line, lines.occurrence, "line") ** (1 / weight)
            keyed.append((key, name, lines))
    keyed.sort(key=lambda one: one[0], reverse=True)
    return [_chosen(seed, name, lines) for _, name, lines in keyed[:count]]


@dataclass(frozen=True)
class EditedLine:
    """A line of a source file and the edits that begin in it."""

    number: int
    line: str
    occurrence: int
    edits: tuple[Edit, ...]
    source: str


def edited_lines(path: Path) -> Iterator[EditedLine]:
    source = path.read_text()
    by_line: dict[int, list[Edit]] = {}
    for edit in (cpp_edits if path.suffix in CPP else python_edits)(source):
        by_line.setdefault(edit.line, []).append(edit)
    seen: Counter[str] = Counter()
    for number, line in enumerate(source.splitlines(), 1):
        if edits := by_line.get(number):
            yield EditedLine(number, line, seen[line], tuple(edits), source)
        seen[line] += 1


def mutated(root: Path, mutant: Mutant) -> tuple[str, int]:
    """The text of the mutant's file with its change, and the number of the line.

    Raises LookupError if the line is no longer in the tree.
    """
    path = root / mutant.path
    if path.exists():
        for lines in edited_lines(path):
            if (lines.line, lines.occurrence) == (mutant.line, mutant.occurrence):
                return apply(lines.source, lines.edits[mutant.choice]), lines.number
    raise LookupError(f"{mutant.path} has no line {mutant.line.strip()!r}")


def _chosen(seed: int, name: str, lines: EditedLine) -> Mutant:
    unit = _unit(seed, name, lines.line, lines.occurrence, "edit")
    first = int(unit * len(lines.edits))
    choices = [*range(first, len(lines.edits)), *range(first)]
    choice = next(i for i in choices if _parses(name, apply(lines.source, lines.edits[i])))
    edit = lines.edits[choice]
    was = " ".join(lines.source[edit.start : edit.end].split())
    return Mutant(name, lines.line, lines.occurrence, choice, f"{was} -> {edit.text}")


def _parses(name: str, source: str) -> bool:
    if not name.endswith(".py"):
        return True  # left to the compiler
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _sources(root: Path) -> Iterator[Path]:
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*")):
            if "native/test" not in path.as_posix() and (
                path.suffix in CPP or (path.suffix == ".py" and "_pb2" not in path.name)
            ):
                yield path


def _unit(seed: int, *words: object) -> float:
    """A number in [0, 1) that is a function of its arguments."""
    digest = hashlib.sha256(repr((seed, words)).encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
