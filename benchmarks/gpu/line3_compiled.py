"""Line 3: every kernel compiles for sm_80 and sm_90 as the committed table has it, without spilled
registers and with the matrix instructions that were promised."""

import json
import os

from pytest_line import run_tests

os.environ["COMPILED"] = "all"
print(json.dumps(run_tests("tests/kernels/cuda/test_compiled.py")))
