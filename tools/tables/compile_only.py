"""A Triton driver that compiles every launch and runs none: no GPU is needed.

Not for use with TRITON_INTERPRET, which is read when a kernel's module is imported.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

MOST_SHARED = {80: 166912, 90: 232448}  # maximum bytes of shared memory per block
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """The compiler's result for one launch."""

    kernel: str
    registers: int
    spilled: int  # bytes of local memory per thread
    shared: int  # bytes
    mma: str  # family of the matrix instructions: HGMMA, HMMA or ""
    doubles_fused: int  # DFMA instructions


class _Utils:
    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MOST_SHARED[self._arch], "multiprocessor_count": 132}

    def load_binary(self, *args: object) -> tuple[object, object, int, int, int]:
        return None, None, 0, 0, 1024


@dataclass
class CompileOnlyDriver:
    """The driver for compute capability arch / 10."""

    arch: int
    launched: list[Compiled] = field(default_factory=list)  # in order

    def __post_init__(self) -> None:
        self.utils = _Utils(self.arch)
        self._known: dict[int, Compiled] = {}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # a separate cache per architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: None

    def note(self, kernel: Any) -> None:
        """Record a compiled kernel at its launch."""
        if id(kernel) not in self._known:
            self._known[id(kernel)] = _described(kernel)
        self.launched.append(self._known[id(kernel)])


@contextmanager
def compile_only(arch: int) -> Iterator[CompileOnlyDriver]:
    """Compile launches in this context for `arch`, 80 or 90, and record them in the driver. The
    driver stays Triton's afterwards, so this is for a process that does nothing else."""
    made = CompileOnlyDriver(arch)
    before = triton.JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = before(self, *args, **kwargs)
        made.note(kernel)
        return kernel

    driver.set_active(made)
    triton.JITFunction.run = run
    try:
        yield made
    finally:
        triton.JITFunction.run = before


def _described(kernel: Any) -> Compiled:
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.kernel)
        usage, code = (
            subprocess.run(
                [TOOL, how, file.name], capture_output=True, text=True, check=True
            ).stdout
            for how in ("--dump-resource-usage", "--dump-sass")
        )
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z0-9]+)", code, re.M)
    families = [name for name in ("HGMMA", "HMMA") if name in instructions]
    return Compiled(
        kernel.name,
        int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        int(re.search(r"LOCAL:(\d+)", usage)[1]) + int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        kernel.metadata.shared,
        "+".join(families),
        instructions.count("DFMA"),
    )
