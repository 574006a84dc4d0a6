"""Line 1: every kernel interpreted, on odd shapes, against the oracle; noise and picks bit for bit;
no test is skipped for a missing compiler or NVIDIA library."""

import json

from pytest_line import run_tests

figures = run_tests(
    "tests/kernels/cuda", "tests/kernels/test_copy_hash.py", "tests/kernels/test_copy_hash_cu.py",
    "tests/engine/transport/test_cuda_device.py", "tests/engine/models/test_cuda_decoder.py",
)  # fmt: skip
print(json.dumps(figures))
