"""Line 6: vectors as transformers gives them, alone and in a batch; rerank and score order as its
logits do. Tests check it."""

import json

from pytest_line import run_tests

found = run_tests("tests/system/test_embeddings.py", "tests/engine/execution/test_pooling.py")
print(json.dumps(found))
