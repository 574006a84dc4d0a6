"""Line 5: a tokenizer.json of 64 KB that took gigabytes takes less than 10 MB; a panic of a library
is one error, streamed or not, and one line in the log of a worker process whose load it ends, with
exit code 1."""

import json
import os
import subprocess
import sys
from typing import Any

from pytest_line import run_tests

MOST_BYTES = 10_000_000
SIZE = 64 << 10
# Special tokens of the maximum length: every prefix and suffix of each was once stored separately.
LOAD = """
import json, psutil
from fakes.router import tokenizer_json
from pdserve.gateway.text.tokenizer import Tokenizer
from pdserve.gateway.text.vocabulary import TextCard

card = TextCard(vocab_size=400, bos_id=None, eos_ids=(2,), adds_bos=False)
plain = tokenizer_json()
Tokenizer(plain, card)
settings = json.loads(plain)
first = max(token["id"] for token in settings["added_tokens"]) + 1
for number in range(NUM_TOKENS):
    token = dict(settings["added_tokens"][0], id=first + number, special=True)
    settings["added_tokens"].append(token | {"content": f"<{number:01022}>"})
hostile = json.dumps(settings).encode()
process = psutil.Process()
before = process.memory_info().rss
kept = Tokenizer(hostile, card)
kept.encode("<aaa bbb>", add_special_tokens=False, parse_special=True)
print(json.dumps({"file": len(hostile), "bytes": process.memory_info().rss - before}))
"""
# A decode worker whose weights are read by a Rust library that panics.
WORKER = """
import sys
from builders.broken_tokenizers import panics_on_load
from fakes.router import tokenizer_json
from pdserve.services.cli.main import main
from pdserve.services.worker import role
from tokenizers import Tokenizer

broken = panics_on_load(tokenizer_json())
role.build_engine = lambda config, progress: Tokenizer.from_buffer(broken).encode("a")
words = ["--cluster-secret", "s" * 32, "--bind", "127.0.0.1:0", "--routers", "127.0.0.1:1"]
sys.exit(main(["decode", *words]))
"""
TESTS = (
    "tests/gateway/test_service.py::test_a_broken_blob_is_a_server_error",
    "tests/gateway/test_service.py::test_a_panic_during_preparation_is_one_error",
    "tests/gateway/test_text_processes.py::test_invalid_files_are_refused",
    "tests/services/worker/test_worker_process.py::test_a_panic_while_loading_is_one_line",
)


def worker() -> dict[str, Any]:
    """The exit of the process, and all output of pdserve, separate from the library's message."""
    environment = os.environ | {"RUST_BACKTRACE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=120, env=environment
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("pdserve")]
    whole = len(said) == 1 and "PanicException" in said[0] and "Traceback" not in done.stderr
    return {"ok": done.returncode == 1 and whole, "exit_code": done.returncode, "said": said}


def main() -> None:
    script = LOAD.replace("NUM_TOKENS", str(SIZE >> 10))
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=300
    )
    tokenizer = json.loads(done.stdout)
    small = tokenizer["bytes"] < MOST_BYTES and tokenizer["file"] >= SIZE
    parts = {"panics": run_tests(*TESTS), "worker": worker()}
    ok = small and all(part["ok"] for part in parts.values())
    print(json.dumps({"ok": ok, "tokenizer": tokenizer, **parts}))


if __name__ == "__main__":
    main()
