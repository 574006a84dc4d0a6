"""Line 1: how full and deep a folder is, who imports whom, circles, pure modules; by discovery."""

import json

from pytest_line import run_tests

print(json.dumps(run_tests("tests/test_layers.py")))
