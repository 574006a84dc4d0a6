"""Line 2: each class name is defined once in the product."""

import json

from pytest_line import run_tests

print(json.dumps(run_tests("tests/test_layers.py", "-k", "defined_once")))
