"""Line 4: every flag, variable, metric, route and page named in documents and deployments is in the
code, and vice versa. A test checks it."""

import json

from pytest_line import run_tests

READS_PROSE = True

print(json.dumps(run_tests("tests/test_docs.py")))
