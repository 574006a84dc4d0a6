"""Line 4: every flag, variable, metric, route and page that documents and deployments name is in
the code, and what is in the code is documented. A test checks it."""

import json

from pytest_line import run_tests

READS_PROSE = True

print(json.dumps(run_tests("tests/test_docs.py")))
