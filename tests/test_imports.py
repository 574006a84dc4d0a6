"""Imports go one way: allowed imports of each part, no circles, and no I/O in pure modules."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("text", "gateway", "services", "cli", "llm", "engine", "kernels")
ENGINE_API = "pdserve.engine.api"  # imports only the standard library
GRAMMAR_TOKENIZER = "pdserve.engine.api.grammar_tokenizer"  # imports only llguidance
ROUTER_MAY = (
    ENGINE_API,
    "pdserve.engine.handoff.protocol",
    "pdserve.engine.handoff.recorder",
    "pdserve.engine.kv",
)
TEXT = ("pdserve.text", ENGINE_API)
SHELL = ("pdserve.protos", "pdserve.services.common", "pdserve.text", "pdserve.gateway")
PROCESSES = (  # of services: what tokenizer workers share with other processes
    "pdserve.services.common.errors",
    "pdserve.services.common.logs",
    "pdserve.services.common.process",
    "pdserve.services.common.fairness",
)

# place -> (product modules it may import, modules it must not)
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kernels": (("pdserve.kernels",), ("grpc", "fastapi")),
    "engine": (("pdserve.kernels", "pdserve.engine"), ("grpc", "fastapi", "google.protobuf")),
    "services/common": (
        ("pdserve.protos", "pdserve.services.common", ENGINE_API),
        ("torch", "fastapi"),
    ),
    "services/worker": (
        ("pdserve.engine", "pdserve.protos", "pdserve.services.common", "pdserve.services.worker"),
        ("torch", "fastapi"),
    ),
    "services/router": (
        ("pdserve.protos", "pdserve.services.common", "pdserve.services.router", *ROUTER_MAY),
        ("torch", "fastapi"),
    ),
    "services/prefill": (
        (
            "pdserve.engine",
            "pdserve.protos",
            "pdserve.services.common",
            "pdserve.services.worker",
            "pdserve.services.prefill",
        ),
        ("fastapi",),
    ),
    "services/decode": (
        (
            "pdserve.engine",
            "pdserve.protos",
            "pdserve.services.common",
            "pdserve.services.worker",
            "pdserve.services.decode",
        ),
        ("fastapi",),
    ),
    "text": (TEXT, ("torch", "fastapi", "starlette", "uvicorn", "grpc")),
    "text/workers": (
        ("pdserve.protos.common_pb2", *PROCESSES, *TEXT),
        ("torch", "fastapi", "starlette", "uvicorn"),
    ),
    "text/structured_output": ((GRAMMAR_TOKENIZER, *TEXT), ("torch", "fastapi", "grpc")),
    "gateway": (
        (
            "pdserve.protos",
            "pdserve.services.common",
            "pdserve.text",
            "pdserve.gateway",
            ENGINE_API,
        ),
        ("torch",),
    ),
    "gateway/http": (  # the shell of every API, so it knows none
        (*SHELL, ENGINE_API),
        ("torch", "pdserve.gateway.openai", "pdserve.gateway.anthropic"),
    ),
    "gateway/web": (  # pages, which call the APIs as any client does
        SHELL,
        ("torch", "grpc", "pdserve.gateway.openai", "pdserve.gateway.anthropic"),
    ),
    "gateway/openai": (  # APIs know nothing of each other
        (*SHELL, ENGINE_API),
        ("torch", "pdserve.gateway.anthropic"),
    ),
    "gateway/anthropic": (
        (*SHELL, ENGINE_API),
        ("torch", "pdserve.gateway.openai"),
    ),
    "services/picker": (
        (
            "pdserve.gateway",
            "pdserve.text",
            "pdserve.protos",
            "pdserve.services.common",
            "pdserve.services.picker",
        ),
        ("torch",),
    ),
    "cli/options": (("pdserve",), ("torch", "grpc", "fastapi")),
    "cli": (("pdserve",), ()),
    "cli/up": (("pdserve",), ("torch", "grpc", "fastapi")),
    "llm": (
        (
            "pdserve.engine",
            *TEXT,
            "pdserve.llm",
            "pdserve.cli.progress",
            "pdserve.cli.options",
        ),
        ("grpc", "fastapi", "google.protobuf"),
    ),
}
IMPURE_IMPORTS = {"torch", "grpc", "socket", "asyncio", "threading", "time", "os", "subprocess"}
COMPOSING = ("cli", "llm")  # they build on everything else


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def absolute_imports(path: Path) -> list[str]:
    """Return the dotted names that a file imports, anywhere in it."""
    names: list[str] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names += [
                f"{module}.{a.name}" if module.startswith("pdserve") else module for a in node.names
            ]
    return names


def sources(*places: str) -> list[Path]:
    files = (path for place in places for path in sorted((ROOT / place).rglob("*.py")))
    return [path for path in files if "_pb2" not in path.name]


def under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def place_of(path: Path) -> str:
    """Return the innermost place of RULES that the file is in."""
    inside = [place for place in RULES if path.is_relative_to(ROOT / place)]
    assert inside, f"RULES has no place for {path.relative_to(ROOT)}"
    return max(inside, key=len)


def test_each_place_imports_only_what_it_may(subtests: pytest.Subtests) -> None:
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sources(*PRODUCT):
        files[place_of(path)].append(path)
    assert files.keys() == RULES.keys()
    for place, (allowed, forbidden) in RULES.items():
        with subtests.test(place):
            bad = [
                f"{path.relative_to(ROOT)} imports {name}"
                for path in files[place]
                for name in absolute_imports(path)
                if (name.startswith("pdserve") and not under(name, allowed))
                or under(name, forbidden)
            ]
            assert bad == []


def test_only_the_package_imports_the_composing_folders() -> None:
    composing = tuple(f"pdserve.{name}" for name in COMPOSING)
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("protos", *PRODUCT)
        if path.relative_to(ROOT).parts[0] not in COMPOSING
        for name in absolute_imports(path)
        if under(name, composing)
    ]
    assert bad == []


def says_pure(path: Path) -> bool:
    """Return whether a docstring ends a sentence with "Pure." or says "; pure", with or without a
    remark.
    """
    text = ast.get_docstring(parsed(path)) or ""
    return re.search(r"(?:^|[.;)]\s+)pure\b(?! function)", text, re.IGNORECASE) is not None


def test_modules_that_call_themselves_pure_do_no_io(subtests: pytest.Subtests) -> None:
    pure = {str(p.relative_to(ROOT)): p for p in sources(*PRODUCT) if says_pure(p)}
    assert {"engine/scheduling/scheduler.py", "engine/handoff/protocol/machine.py"} <= pure.keys()
    assert {"engine/kv/block_pool.py", "services/router/placement/policy.py"} <= pure.keys()
    for name, path in pure.items():
        with subtests.test(name):
            assert not {one.split(".")[0] for one in absolute_imports(path)} & IMPURE_IMPORTS


# --- circles


def modules(*places: str) -> dict[str, Path]:
    """Return files by dotted name; an __init__.py has the name of its folder."""
    found = {}
    for path in sources(*places):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def file_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return the imports of each file, including those for type checkers."""
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        graph[name] = set()
        for imported in absolute_imports(path):
            target = imported.removeprefix("pdserve.")
            beside = ".".join([*name.split(".")[:-1], target])  # a script's folder comes first
            whole = [beside, target, target.rpartition(".")[0]]
            graph[name].add(next((one for one in whole if one in known), name))
        graph[name].discard(name)
    return graph


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of two or more (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            found, stack[at:] = stack[at:], []
            if len(found) > 1:
                yield sorted(found)

    for name in graph:
        if name not in number:
            yield from visit(name)


def test_a_circle_is_found(tmp_path: Path) -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert list(circles(graph)) == [["a", "b", "c"]]
    (tmp_path / "a.py").write_text("from b import x")
    (tmp_path / "b.py").write_text("def f():\n    from a import x")
    scripts = file_graph({f"cpu.{name}": tmp_path / f"{name}.py" for name in "ab"})
    assert list(circles(scripts)) == [["cpu.a", "cpu.b"]]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert list(circles(file_graph(modules(*PRODUCT)))) == []
    scripts = modules("benchmarks")  # they import each other from this folder
    known = {name.partition(".")[2] or name: path for name, path in scripts.items()}
    assert list(circles(file_graph(known))) == []


def test_no_sibling_folders_import_each_other() -> None:
    """Checks each of the product's folders; between these, RULES decides."""
    uses: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    known = modules(*PRODUCT)
    inside = {n: f"{n}.__init__" if p.name == "__init__.py" else n for n, p in known.items()}
    for module, others in file_graph(known).items():
        name = inside[module]
        for other in map(inside.__getitem__, others):
            here, there = name.split("."), other.split(".")
            while len(here) > 1 and len(there) > 1 and here[0] == there[0]:
                if here[1] != there[1] and len(here) > 2 and len(there) > 2:
                    break
                here, there = here[1:], there[1:]
            else:
                continue
            parent = name.split(".")[: len(name.split(".")) - len(here) + 1]
            folder = ".".join(parent)
            uses[f"{folder}.{here[1]}", f"{folder}.{there[1]}"].append(f"{name} -> {other}")
    assert len(uses) > 20
    mutual = [found for (a, b), found in sorted(uses.items()) if (b, a) in uses]
    assert mutual == []
