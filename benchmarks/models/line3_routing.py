"""Line 3: the torch and the native router choose the same of 64 experts as transformers' routers,
on 10,000 random rows."""

import json

from pytest_line import run_tests

print(json.dumps(run_tests("tests/kernels/test_routing.py")))
