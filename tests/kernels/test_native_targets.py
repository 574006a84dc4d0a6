"""The C++ tests of the kernels: built and run normally, with sanitizers, and for other machines.

They compare every instruction set with scalar code. Builds are kept in build/native-test, so a
second run only checks whether anything changed.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.kernels import _native

ROOT = Path(__file__).parents[2]
X86 = platform.machine() == "x86_64"
CROSS = "aarch64-linux-gnu-g++"
# Emulated machines without AVX-512 and without AVX2, and the targets chosen there: no code may use
# instructions of a higher target.
EMULATED = {"Haswell": "avx2 generic", "Nehalem": "generic"}

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(3600)]


def run(*words: str | Path, **environment: str) -> str:
    """Return a command's output; fail the test with that output if the command fails."""
    done = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{words[0]} failed:\n{done.stdout[-6000:]}"
    return done.stdout


def build(name: str, **cache: str) -> Path:
    """Return the test program, built with these CMake variables."""
    folder = ROOT / "build" / "native-test" / name
    beside = Path(sys.executable).with_name("cmake")  # the cmake package of the test extra
    cmake = shutil.which("cmake") or str(beside)
    if not (folder / "CMakeCache.txt").exists():
        generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
        values = [f"-D{key}={value}" for key, value in cache.items()]
        source = ROOT / "kernels" / "native" / "test"
        run(cmake, "-G", generator, "-S", source, "-B", folder, *values)
    run(cmake, "--build", folder, "--parallel", "2")
    return folder / "native_test"


def needs(*programs: str) -> None:
    """Skip the test and name the missing programs."""
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (.ci/run installs them)")


def test_native_build() -> None:
    out = run(build("plain", CMAKE_BUILD_TYPE="Release"))
    assert out.startswith("targets: " + " ".join(_native.isas()) + "\n")


def test_with_address_and_undefined_behaviour_sanitizers() -> None:
    program = build("asan", PDSERVE_SANITIZE="address,undefined")
    run(program, UBSAN_OPTIONS="print_stacktrace=1")


def test_with_thread_sanitizer() -> None:
    program = build("tsan", PDSERVE_SANITIZE="thread")
    run(program, "pool", "attention", "decoder", NATIVE_TEST_THIN="4")


@pytest.mark.parametrize("cpu", EMULATED)
@pytest.mark.skipif(not X86, reason="an x86-64 program")
def test_on_emulated_older_machines(cpu: str) -> None:
    needs("qemu-x86_64")
    program = build("plain", CMAKE_BUILD_TYPE="Release")
    out = run("qemu-x86_64", "-cpu", cpu, program, NATIVE_TEST_SLACK="1", NATIVE_TEST_THIN="4")
    assert f"targets: {EMULATED[cpu]}\n" in out


def test_on_aarch64() -> None:
    needs(CROSS, "qemu-aarch64")
    program = build(
        "aarch64",
        CMAKE_BUILD_TYPE="Release",
        CMAKE_SYSTEM_NAME="Linux",
        CMAKE_SYSTEM_PROCESSOR="aarch64",
        CMAKE_CXX_COMPILER=CROSS,
        CMAKE_EXE_LINKER_FLAGS="-static",
        PDSERVE_OPTIMIZE="-O1",  # halves compile time; rounding is the same
    )
    out = run("qemu-aarch64", program, NATIVE_TEST_THIN="2")
    assert out.startswith("targets: generic\n")


@pytest.mark.parametrize("isa", _native.isas())
def test_the_instruction_set_is_a_setting(isa: str) -> None:
    assert _native.Context(1, isa=isa).isa == isa
    show = "from pdserve.kernels import _native; print(_native.Context(1).isa)"
    assert run(sys.executable, "-c", show, PDSERVE_NATIVE_ISA=isa) == f"{isa}\n"


def test_the_best_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_NATIVE_ISA", raising=False)
    assert _native.Context(1).isa == _native.isas()[0]
    with pytest.raises(ValueError, match=r"no kernels for 'mmx'; it has .*generic"):
        _native.Context(1, isa="mmx")
    monkeypatch.setenv("PDSERVE_NATIVE_ISA", "mmx")
    with pytest.raises(ValueError, match=r"no kernels for 'mmx'"):
        _native.Context(1)
