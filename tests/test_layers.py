"""Who may import whom: the table of docs/design.md, checked on the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("protos", "gateway", "services", "engine", "kernels")
ROUTER_MAY = (
    "pdserve.engine.handoff.machine",
    "pdserve.engine.handoff.trace",
    "pdserve.engine.handoff.ring",
    "pdserve.engine.block_hash",
    "pdserve.engine.kv_identity",
    "pdserve.engine.kv_spec",
)

# place -> (our modules it may import, modules it must not)
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kernels": (("pdserve.kernels",), ("grpc", "fastapi")),
    "engine": (("pdserve.kernels", "pdserve.engine"), ("grpc", "fastapi", "google.protobuf")),
    "services/host": (("pdserve.protos", "pdserve.services.host"), ("torch", "fastapi")),
    "services/router": (
        ("pdserve.protos", "pdserve.services.host", "pdserve.services.router", *ROUTER_MAY),
        ("torch", "fastapi"),
    ),
    "services/prefill": (
        ("pdserve.engine", "pdserve.protos", "pdserve.services.host", "pdserve.services.prefill"),
        ("fastapi",),
    ),
    "services/decode": (
        ("pdserve.engine", "pdserve.protos", "pdserve.services.host", "pdserve.services.decode"),
        ("fastapi",),
    ),
    "gateway": (("pdserve.protos", "pdserve.services.host", "pdserve.gateway"), ("torch",)),
    "gateway/text": (
        ("pdserve.gateway.text",),
        ("torch", "fastapi", "starlette", "uvicorn", "grpc"),
    ),
    "services/cli": (("pdserve",), ()),
}
PURE = (
    "engine/request.py",
    "engine/kv_identity.py",
    "engine/kv_spec.py",
    "engine/kv_pages.py",
    "engine/config.py",
    "engine/accounting.py",
    "engine/pulse.py",
    "engine/scheduler.py",
    "engine/plan.py",
    "engine/progress.py",
    "engine/roster.py",
    "engine/sequence.py",
    "engine/limits.py",
    "engine/reservation.py",
    "engine/block_tables.py",
    "engine/block_pool.py",
    "engine/block_hash.py",
    "engine/handoff/lease.py",
    "engine/handoff/machine.py",
    "engine/transport/cuda_handshake.py",
    "engine/transport/slots.py",
    "engine/handoff/pace.py",
    "engine/handoff/terms.py",
    "services/router/cards.py",
    "engine/handoff/trace.py",
    "engine/handoff/timeline.py",
    "engine/handoff/life.py",
    "engine/handoff/conform.py",
    "engine/handoff/seed.py",
    "services/decode/flights.py",
    "services/decode/transcript.py",
    "services/host/stillness.py",
    "services/router/migrations.py",
    "services/router/endings.py",
    "services/router/rebalance.py",
    "services/router/policy.py",
    "services/router/promised.py",
    "services/router/times.py",
    "services/router/queues.py",
    "gateway/text/stop.py",
)
IMPURE_IMPORTS = {"torch", "grpc", "socket", "asyncio", "threading", "time", "os", "subprocess"}


def imports(path: Path) -> list[str]:
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
        for name in imports(path)
        if (name.startswith("pdserve") and not under(name, allowed)) or under(name, forbidden)
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_do_no_io(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(ROOT / module)}
    assert not roots & IMPURE_IMPORTS


def test_only_the_package_imports_cli() -> None:
    bad = [
        str(path)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ROOT / "services/cli")
        and any(under(name, ("pdserve.services.cli",)) for name in imports(path))
    ]
    assert not bad


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
