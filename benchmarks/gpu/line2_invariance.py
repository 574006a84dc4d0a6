"""Line 2: 1,000 random cases, interpreted. The last token of a row of attention has the same bits
in its step, alone by the decode kernel and in a chunk of another length, and so has a token's
product alone and in a batch. Decoders of whole models, too, in chunks and beside others."""

import json
import os

from pytest_line import run_tests

os.environ |= {"ATTENTION_CASES": "500", "LINEAR_CASES": "500"}
kernels = run_tests("tests/kernels/cuda", "-k", "random_rows or random_batches")
models = run_tests("tests/engine/models/test_cuda_decoder.py", "-k", "same_whatever")
ok = kernels["ok"] and models["ok"] and kernels["tests"] == 1000
print(json.dumps({"ok": ok, "random_cases": kernels, "models": models}))
