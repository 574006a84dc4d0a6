"""Line 4: every format unpacks to the values of its reference, bit for bit, and a model in it gives
the tokens of its dequantized copy."""

import json

from pytest_line import run_tests

parts = {
    "values": run_tests("tests/engine/weights"),
    "packed": run_tests(
        "tests/kernels/test_native_linear.py", "tests/kernels/test_packed_groups.py"
    ),
    "quantized checkpoints": run_tests(
        "tests/engine/checkpoints/test_quantized.py",
        "tests/engine/checkpoints/test_mxfp4_experts.py",
    ),
}
print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))
