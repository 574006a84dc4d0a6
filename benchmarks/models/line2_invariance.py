"""Line 2: a token's logits have the same bits for any chunks, other requests, threads, shares and
block sizes, for every architecture in a quantized form and for some in bf16."""

import json

from pytest_line import run_tests

print(json.dumps(run_tests("tests/engine/models/test_native_invariance.py")))
