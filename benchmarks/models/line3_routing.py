"""Line 3: of 64 experts the torch and the native router choose those that transformers' routers
choose, on 10,000 random rows."""

import json

from pytest_line import run_tests

print(json.dumps(run_tests("tests/kernels/test_routing.py")))
