"""A program that ends while an LLM is open prints no warning and exits with 0."""

import subprocess
import sys
from pathlib import Path

from builders.tiny_models import write_tiny

PROGRAM = """
import sys
from pdserve import LLM
llm = LLM(sys.argv[1], kv_tokens=512)
stream = llm.generate_stream("Hello")
next(stream)
"""


def test_a_program_that_does_not_close_an_llm_ends_silently(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "llama")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
