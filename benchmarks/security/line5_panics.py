"""Line 5: a tokenizer.json of 64 KB that took gigabytes takes less than 10 MB; a panic of a library
is one error, streamed or not, and one line of a worker whose load it ends."""

import json
import subprocess
import sys

from pytest_line import run_tests

MOST_BYTES = 10_000_000
SIZE = 64 << 10
# Special tokens of the greatest length: every prefix and suffix of each was once kept by itself.
LOAD = """
import json, psutil
from fake_router import tokenizer_json
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
TESTS = (
    "tests/gateway/test_service.py::test_a_broken_blob_is_the_servers_fault",
    "tests/gateway/test_text_processes.py::test_what_cannot_be_loaded",
    "tests/services/worker/test_worker_process.py::test_a_panic_while_loading_is_one_line",
)


def main() -> None:
    script = LOAD.replace("NUM_TOKENS", str(SIZE >> 10))
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=300
    )
    tokenizer = json.loads(done.stdout)
    small = tokenizer["bytes"] < MOST_BYTES and tokenizer["file"] >= SIZE
    panics = run_tests(*TESTS)
    print(json.dumps({"ok": small and panics["ok"], "tokenizer": tokenizer, "panics": panics}))


if __name__ == "__main__":
    main()
