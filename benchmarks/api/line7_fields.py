"""Line 7: docs/api.md lists every field of every API, and a test checks it against a running
app."""

import json

from pytest_line import run_tests

READS_PROSE = True

print(json.dumps(run_tests("tests/gateway/openai/test_api_page.py")))
