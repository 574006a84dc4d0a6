"""Line 5: the cost of formats: packed memory within MEMORY of the stored bytes for every type with
a separate layout, the products of some within TIMES of a classic format's, packing; and a mixture
of experts at x1 against the dense model that reads as much. IQ1 to IQ3 and TQ are levels of 8 bits:
their memory is shown, and only their packing time is bounded. `make accept-cpu` checks whether the
classic formats are slower."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.kernels import experts, formats
from pdserve.engine.weights.format import BlockFormat
from pdserve.engine.weights.formats import formats as stored_formats
from pdserve.kernels.cpu import CpuKernels

SMALL_BITS, MEMORY, MEMORY_SMALL = 4.0, 1.15, 1.35  # the second below SMALL_BITS
TIMES = {"Q2_K": 1.3, "IQ4_NL": 1.3, "MXFP4": 1.3, "FP8 of blocks": 1.2, "FP8 of outputs": 1.2}
PACK_S, PACK_LEVELS_S = 20.0, 60.0  # per 1e9 weights


def fault(found: dict[str, Any]) -> str:
    """The resource that a format exceeds."""
    name, bits = found["format"], found["stored_bits"]
    if name in formats.LEVELS:
        return f"{found['pack_1e9_s']} s to pack" if found["pack_1e9_s"] > PACK_LEVELS_S else ""
    if found["memory"] > (MEMORY if bits >= SMALL_BITS else MEMORY_SMALL):
        return f"{found['memory']} times its stored bytes"
    if found["time"] > TIMES.get(name, float("inf")):
        return f"{found['time']} of the time of {found['beside']}"
    return f"{found['pack_1e9_s']} s to pack" if found["pack_1e9_s"] > PACK_S else ""


def main() -> None:
    kernels = CpuKernels()
    rows = [formats.measure(kernels, name) for name in formats.known()]
    faults = {row["format"]: text for row in rows if (text := fault(row))}
    for name, form in stored_formats().items():
        if isinstance(form, BlockFormat) and name not in formats.known():
            faults[name] = "expanded to float32"
    mixture = experts.measure(kernels)
    kept = ("stored_bits", "memory", "time", "beside", "pack_1e9_s")
    print(
        json.dumps(
            {
                "ok": not faults and bool(mixture["ok"]),
                "numerics": kernels.numerics,
                "faults": faults,
                "formats": {row["format"]: {key: row[key] for key in kept} for row in rows},
                "experts": mixture,
            }
        )
    )


if __name__ == "__main__":
    main()
