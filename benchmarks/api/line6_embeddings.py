"""Line 6: vectors as transformers gives them, alone and in a batch; rerank and score order as its
logits do. Tests check it."""

import json

from pytest_line import run_tests

FILES = (
    "tests/engine/test_pooling.py",
    "tests/system/test_embeddings.py",
    "tests/system/test_rerank.py",
)

print(json.dumps(run_tests(*FILES)))
