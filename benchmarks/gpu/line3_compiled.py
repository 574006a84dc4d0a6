"""Line 3: every kernel compiles for sm_80 and sm_90 to the results in the committed table, without
spilled registers and with the expected matrix instructions."""

import json
import os

from pytest_line import run_tests

os.environ["COMPILED"] = "all"
print(json.dumps(run_tests("tests/kernels/cuda/test_compiled.py")))
