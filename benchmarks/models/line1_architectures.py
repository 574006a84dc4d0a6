"""Line 1: every architecture gives transformers' logits and greedy tokens on both kernels, from
safetensors and GGUF, alone, in a batch of mixed lengths and after a hand-off."""

import json

from pytest_line import run_tests

parts = {
    "logits and tokens": run_tests("tests/engine/models/test_architectures.py"),
    "GGUF": run_tests("tests/engine/checkpoints/test_gguf_checkpoint.py"),
    "batches and hand-offs": run_tests("tests/services/test_handoff_models.py"),
    "released configs": run_tests("tests/engine/models/test_released_configs.py"),
}
print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))
