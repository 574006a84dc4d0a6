"""The table of compiled kernels: the compiler's result for each launch and compute capability.

Run without TRITON_INTERPRET, it prints the lines of the table; with --few those that every test run
compiles.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))

from compile_only import compile_only
from kernel_launches import LAUNCHES

ARCHS = (80, 90)
TABLE = Path(__file__).parents[2] / "benchmarks/gpu/compiled_kernels.jsonl"
# The launches that every test run compiles: the formats and heads of most models, and one of each
# other kernel.
FEW = (
    *(f"attention, bfloat16 over bfloat16, heads of {dim}, groups of 2" for dim in (64, 128)),
    "attention, bfloat16 over bfloat16, heads of 256, groups of 2, capped, sinks",
    *(
        f"linear {kind} torch.bfloat16 {shape}"
        for kind in ("BF16/0", "Q4_K/0", "INT4/128", "FP8/128")
        for shape in ("16 tokens by 16 separate", "256 tokens by 128 looped")
    ),
    "experts Q4_K/0 torch.bfloat16 16 tokens",
    "every kind of sample, 151936 tokens",
    "sum and norm of 4096",
    "gated silu",
    "sums of splits and norm of 4096",
    "heads of 128 to torch.bfloat16",
)


def lines(few: bool) -> Iterator[str]:
    """One JSON object per kernel of each launch, in the order of the table."""
    for arch in ARCHS:
        with compile_only(arch) as driver:
            for launches in LAUNCHES:
                for label, launch in launches():
                    if few and label not in FEW:
                        continue
                    driver.launched.clear()
                    launch()
                    for number, kernel in enumerate(driver.launched):
                        place = {"arch": arch, "launch": label, "number": number}
                        yield json.dumps(place | asdict(kernel))


if __name__ == "__main__":
    for line in lines("--few" in sys.argv):
        print(line, flush=True)
