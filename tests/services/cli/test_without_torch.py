"""Nothing on the native backend imports torch; what needs it says which extra brings it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny

LLM = """
import sys
from pdserve import LLM
with LLM(sys.argv[1], kv_tokens=512) as llm:
    result = llm.generate("Hello")[0]
    assert len(result.completions[0].token_ids) > 0
print(sorted(name for name in sys.modules if name.split(".")[0] == "torch"))
"""

# A decode worker that says, once the model is loaded, what it has imported.
WORKER = """
import sys
from pdserve.engine.api.config import EngineConfig
from pdserve.services.decode.main import run
from pdserve.services.decode.settings import DecodeSettings

def report(event, figures):
    if figures.get("fraction") == 1.0:
        print(sorted(name for name in sys.modules if name.split(".")[0] == "torch"), flush=True)

settings = DecodeSettings(cluster_secret="x" * 32, routers=("127.0.0.1:9",))
sys.exit(run(settings, EngineConfig(model=sys.argv[1], kv_tokens=512), report))
"""

BLOCKED = """
import sys
sys.modules["torch"] = None
from pdserve.services.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "llama")


def test_an_llm_in_this_process_imports_no_torch(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LLM, str(model)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_decode_worker_imports_no_torch(model: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == "[]"
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=30)
    assert worker.returncode == 0


@pytest.mark.parametrize(
    "options", [["--kernels", "reference"], ["--weights", "float32"], ["--device", "cuda"]]
)
def test_without_torch_the_extra_is_named(options: list[str], model: Path) -> None:
    command = ["decode", "--model", str(model), "--routers", "127.0.0.1:9", *options]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PDSERVE_CLUSTER_SECRET": "x" * 32},
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pdserve: ")]
    assert " ".join(options) in line
    assert line.endswith("pip install 'pdserve[torch]'")
