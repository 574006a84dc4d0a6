"""The structure of the tree, found by discovery: who may import whom, how full a folder may be,
and that neither files nor sibling folders import each other in a circle."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdserve

ROOT = Path(__file__).parents[1]
FOLDERS = ("protos", "gateway", "services", "engine", "kernels")
PRODUCT = ("gateway", "services", "engine", "kernels")
SAMPLING_BOUNDS = "pdserve.engine.api.sampling_bounds"  # imports nothing: the one table of them
ROUTER_MAY = (
    SAMPLING_BOUNDS,
    "pdserve.engine.handoff.protocol.machine",
    "pdserve.engine.handoff.recorder.event_log",
    "pdserve.engine.handoff.recorder.ring",
    "pdserve.engine.kv.block_hash",
    "pdserve.engine.kv.codec",
    "pdserve.engine.kv.identity",
    "pdserve.engine.kv.spec",
)
LLM_MAY = (  # of the gateway: what makes prompts and reads answers; none of it imports gRPC
    "pdserve.gateway.content.answer_format",
    "pdserve.gateway.content.constraints",
    "pdserve.gateway.grammars",
    "pdserve.gateway.requests",
    "pdserve.gateway.text",
    "pdserve.gateway.text_processes.structure_cache",
)

# place -> (our modules it may import, modules it must not)
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kernels": (("pdserve.kernels",), ("grpc", "fastapi")),
    "engine": (("pdserve.kernels", "pdserve.engine"), ("grpc", "fastapi", "google.protobuf")),
    "services/host": (
        ("pdserve.protos", "pdserve.services.host", SAMPLING_BOUNDS),
        ("torch", "fastapi"),
    ),
    "services/worker": (
        ("pdserve.engine", "pdserve.protos", "pdserve.services.host", "pdserve.services.worker"),
        ("torch", "fastapi"),
    ),
    "services/router": (
        ("pdserve.protos", "pdserve.services.host", "pdserve.services.router", *ROUTER_MAY),
        ("torch", "fastapi"),
    ),
    "services/prefill": (
        (
            "pdserve.engine",
            "pdserve.protos",
            "pdserve.services.host",
            "pdserve.services.worker",
            "pdserve.services.prefill",
        ),
        ("fastapi",),
    ),
    "services/decode": (
        (
            "pdserve.engine",
            "pdserve.protos",
            "pdserve.services.host",
            "pdserve.services.worker",
            "pdserve.services.decode",
        ),
        ("fastapi",),
    ),
    "gateway": (
        ("pdserve.protos", "pdserve.services.host", "pdserve.gateway", SAMPLING_BOUNDS),
        ("torch",),
    ),
    "gateway/http": (  # the shell of every dialect, so it knows none
        ("pdserve.protos", "pdserve.services.host", "pdserve.gateway"),
        ("torch", "pdserve.gateway.openai", "pdserve.gateway.anthropic"),
    ),
    "gateway/web": (  # pages, which call the APIs as any client does
        ("pdserve.protos", "pdserve.services.host", "pdserve.gateway"),
        ("torch", "grpc", "pdserve.gateway.openai", "pdserve.gateway.anthropic"),
    ),
    "gateway/openai": (  # dialects know nothing of each other
        ("pdserve.protos", "pdserve.services.host", "pdserve.gateway", SAMPLING_BOUNDS),
        ("torch", "pdserve.gateway.anthropic"),
    ),
    "gateway/anthropic": (
        ("pdserve.protos", "pdserve.services.host", "pdserve.gateway", SAMPLING_BOUNDS),
        ("torch", "pdserve.gateway.openai"),
    ),
    "gateway/text": (
        ("pdserve.gateway.text", SAMPLING_BOUNDS),
        ("torch", "fastapi", "starlette", "uvicorn", "grpc"),
    ),
    "services/picker": (
        (
            "pdserve.gateway",
            "pdserve.protos",
            "pdserve.services.host",
            "pdserve.services.picker",
        ),
        ("torch",),
    ),
    "services/options": (("pdserve",), ("torch", "grpc", "fastapi")),
    "services/cli": (("pdserve",), ()),
    "services/local": (("pdserve",), ("torch", "grpc", "fastapi")),
    "services/llm": (
        (
            "pdserve.engine",
            *LLM_MAY,
            "pdserve.services.llm",
            "pdserve.services.local.progress",
            "pdserve.services.options",
        ),
        ("grpc", "fastapi", "google.protobuf"),
    ),
}
IMPURE_IMPORTS = {"torch", "grpc", "socket", "asyncio", "threading", "time", "os", "subprocess"}


def absolute_imports(path: Path) -> list[str]:
    """Dotted names that a file imports, anywhere in it, as absolute names."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found += [
                f"{module}.{a.name}" if module.startswith("pdserve") else module for a in node.names
            ]
    return found


def sources(place: str) -> list[Path]:
    files = [p for p in sorted((ROOT / place).rglob("*.py")) if "_pb2" not in p.name]
    nested = [r for r in RULES if r != place and r.startswith(place + "/")]
    return [p for p in files if not any(p.is_relative_to(ROOT / n) for n in nested)]


def under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


@pytest.mark.parametrize("place", RULES)
def test_imports(place: str) -> None:
    allowed, forbidden = RULES[place]
    files = sources(place)
    assert files, f"no sources under {place}"
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in absolute_imports(path)
        if (name.startswith("pdserve") and not under(name, allowed)) or under(name, forbidden)
    ]
    assert not bad, "\n".join(bad)


def test_every_folder_has_its_rule() -> None:
    folders = {p.parent for top in PRODUCT for p in (ROOT / top).rglob("*.py")}
    bare = [f for f in folders if not any(f.is_relative_to(ROOT / place) for place in RULES)]
    assert bare == []


# --- pure modules: what a module says of itself is held against it


def says_pure(path: Path) -> bool:
    """Its docstring ends a sentence with "Pure." or says "; pure", perhaps with a remark."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.search(r"(?:^|[.;)]\s+)pure\b(?! function)", text, re.IGNORECASE) is not None


PURE = [p for top in PRODUCT for p in sorted((ROOT / top).rglob("*.py")) if says_pure(p)]


def test_the_cores_call_themselves_pure() -> None:
    names = {str(path.relative_to(ROOT)) for path in PURE}
    assert len(names) >= 40
    assert {"engine/scheduling/scheduler.py", "engine/handoff/protocol/machine.py"} <= names
    assert {"engine/kv/block_pool.py", "services/router/placement/policy.py"} <= names


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_do_no_io(path: Path) -> None:
    roots = {name.split(".")[0] for name in absolute_imports(path)}
    assert not roots & IMPURE_IMPORTS


# --- folders

MAX_MODULES = 12
MAX_DEPTH = 3
PLUG_INS = {  # may be fuller
    "engine/architectures",
    "engine/weights/formats",
    "engine/transport",
    "gateway/text/tools",
}


def test_no_folder_is_crowded_or_deep() -> None:
    """A C++ file, its header and its copies for each instruction set are one module."""
    full: defaultdict[str, set[str]] = defaultdict(set)
    deep = set()
    for top in PRODUCT:
        for path in (ROOT / top).rglob("*"):
            known = path.suffix in (".py", ".cpp", ".cu", ".h", ".inl")
            if not known or path.name == "__init__.py" or "_pb2" in path.name:
                continue
            folder = path.parent.relative_to(ROOT)
            full[str(folder)].add(re.sub("_(avx2|avx512|generic|scalar)$", "", path.stem))
            if len(folder.parts) > MAX_DEPTH:
                deep.add(str(folder))
    crowded = {f: len(names) for f, names in full.items() if len(names) > MAX_MODULES}
    assert {f: n for f, n in crowded.items() if f not in PLUG_INS} == {}
    assert deep == set()


# --- circles


def modules(*places: str) -> dict[str, Path]:
    """Dotted name -> file; of a folder, its __init__.py."""
    found = {}
    for place in places:
        for path in (ROOT / place).rglob("*.py"):
            if "_pb2" in path.name:
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def file_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """Who imports whom, for type checkers alone too."""
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        graph[name] = set()
        for imported in absolute_imports(path):
            target = imported.removeprefix("pdserve.")
            beside = ".".join([*name.split(".")[:-1], target])  # a script's folder comes first
            whole = [beside, target, target.rpartition(".")[0]]
            found = next((one for one in whole if one in known), name)
            if found != name:
                graph[name].add(found)
    return graph


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components of two or more (Tarjan 1972)."""
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


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert list(circles(graph)) == [["a", "b", "c"]]


def test_scripts_of_one_folder_import_each_other_by_plain_name(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from b import x")
    (tmp_path / "b.py").write_text("def f():\n    from a import x")
    graph = file_graph({f"cpu.{name}": tmp_path / f"{name}.py" for name in "ab"})
    assert graph == {"cpu.a": {"cpu.b"}, "cpu.b": {"cpu.a"}}


@pytest.mark.parametrize("places", [PRODUCT, ("benchmarks",)], ids=["product", "benchmarks"])
def test_no_import_circle(places: tuple[str, ...]) -> None:
    known = modules(*places)
    if places == ("benchmarks",):  # scripts, which import each other from this folder
        known = {name.partition(".")[2] or name: path for name, path in known.items()}
    assert len(known) > 40
    assert list(circles(file_graph(known))) == []


def test_no_siblings_import_each_other() -> None:
    """Within each of the four folders; between these, RULES decides."""
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


def test_only_the_package_imports_the_rooms_that_compose() -> None:
    """Commands, the local supervisor and the Python API build on everything else."""
    rooms = ("cli", "local", "llm")
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.relative_to(ROOT).parts[:2] not in {("services", room) for room in rooms}
        for name in absolute_imports(path)
        if under(name, tuple(f"pdserve.services.{room}" for room in rooms))
    ]
    assert bad == []


def test_each_class_name_is_defined_once() -> None:
    """Generated messages aside, classes that a function makes for itself, and names that users of
    the Python API know: these may be those of what is made of them elsewhere."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    bindings = [path for top in PRODUCT for path in (ROOT / top).rglob("*.pyi")]
    assert bindings
    for path in [*modules(*PRODUCT).values(), *bindings]:
        tree = ast.parse(path.read_text())
        inner = {
            id(node)
            for outer in ast.walk(tree)
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(outer)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and id(node) not in inner:
                defined[node.name].append(str(path.relative_to(ROOT)))
    assert len(defined) > 300
    twice = {name: paths for name, paths in defined.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in pdserve.__all__} == {}
    assert all(len(paths) == 2 for paths in twice.values())


def test_top_level_folders_are_namespaces_reached_by_symlinks() -> None:
    for folder in FOLDERS:
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / folder / "py.typed").exists()
        link = ROOT / ".src/pdserve" / folder
        assert link.is_symlink()
        assert link.resolve() == (ROOT / folder).resolve()
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent != ROOT / folder:
                assert (path.parent / "__init__.py").exists(), path.parent
    assert not (ROOT / "tests/__init__.py").exists()


# --- names that one module knows

LAYER_NAMES = re.compile(
    r"""(?x) (q|k|v|o|qkv|gate|up|down|gate_up)_proj | (input|post_attention|(pre|post)_feedforward)
    _layernorm | embed_tokens | lm_head | self_attn"""
)
KNOW_LAYER_NAMES = {
    "engine/models/layer.py",  # the description
    "engine/models/experts.py",  # of a layer's experts
    "engine/models/latent.py",  # of latent attention
    "engine/checkpoints/gguf/mapping.py",  # the names in GGUF files
}


def test_one_module_names_the_tensors_of_a_layer() -> None:
    """But for architectures, which say where they differ."""
    knowing = {
        str(path.relative_to(ROOT))
        for top in PRODUCT
        for path in (ROOT / top).rglob("*.py")
        if path.parent != ROOT / "engine/architectures" and LAYER_NAMES.search(path.read_text())
    }
    assert knowing == KNOW_LAYER_NAMES
