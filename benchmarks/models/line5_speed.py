"""Line 5, second part: the engine is as fast as before mixtures of experts and packed layouts, run
by run against a build of that commit (structure/line9_speed.py)."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("structure", "cpu")]

from line9_speed import compared  # noqa: E402

BEFORE = "f14d795"
ROWS = ["decode_x1_llamacpp", "decode_x8_llamacpp", "decode_x32_llamacpp", "prefill_512_q4_0"]
ROWS += ["bf16_x1_vllm", "gemma_x1_llamacpp"]
PAIRS = 7

if __name__ == "__main__":
    figures = compared(ROWS, PAIRS, "--any-load" in sys.argv, BEFORE)
    print(json.dumps(figures))
    sys.exit(0 if figures["ok"] else 1)
