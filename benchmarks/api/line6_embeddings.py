"""Line 6: vectors equal those of transformers, alone and in a batch; rerank and score order by the
logits of transformers. Tests check it."""

import json

from pytest_line import run_tests

FILES = (
    "tests/engine/test_pooling.py",
    "tests/system/test_embeddings.py",
    "tests/system/test_rerank.py",
)

print(json.dumps(run_tests(*FILES)))
