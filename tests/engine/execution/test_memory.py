"""The pool's default size respects the tighter limit of host and cgroup."""

from pathlib import Path

import pytest

from pdserve.engine.api import EngineConfig
from pdserve.engine.backends.native import NativeBackend
from pdserve.engine.execution import free_host_bytes

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\n")
    return path


def test_without_a_limit_it_is_the_memory_of_the_host(tmp_path: Path, meminfo: Path) -> None:
    assert free_host_bytes(meminfo, tmp_path / "none") == 8 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(meminfo, tmp_path) == 8 * GIB


def test_a_cgroup_v2_limit_minus_its_usage(tmp_path: Path, meminfo: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert free_host_bytes(meminfo, tmp_path) == 2 * GIB


def test_a_cgroup_v1_limit(tmp_path: Path, meminfo: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text("total_inactive_file 4096\n")
    assert free_host_bytes(meminfo, tmp_path) == GIB + 4096


def test_engines_on_a_host_share_its_memory() -> None:
    one, three = (NativeBackend(EngineConfig(host_engines=n)).pool_bytes() for n in (1, 3))
    assert 0 < three < one
