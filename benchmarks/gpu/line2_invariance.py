"""Line 2: 1,000 random cases, interpreted. The last token of a row of attention has the same bits
in its step, alone in the decode kernel and in a chunk of another length; a token's product has the
same bits alone and in a batch. The same holds for decoders of whole models, in chunks and among
other rows."""

import json
import os

from pytest_line import run_tests

os.environ |= {"ATTENTION_CASES": "500", "LINEAR_CASES": "500"}
kernels = run_tests("tests/kernels/cuda", "-k", "random_rows or random_batches")
models = run_tests("tests/engine/models/test_cuda_decoder.py", "-k", "not_depend")
ok = kernels["ok"] and models["ok"] and kernels["tests"] == 1000
print(json.dumps({"ok": ok, "random_cases": kernels, "models": models}))
