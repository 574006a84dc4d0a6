"""Nothing on the native backend imports torch; errors of code that needs it name the extra."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from builders.engine_kit import ask
from builders.tiny_models import write_tiny
from systems.fleet import Fleet
from systems.forked_commands import run_without

LLM = """
import sys
from pdserve import LLM
with LLM(sys.argv[1], kv_tokens=512) as llm:
    result = llm.generate("Hello")[0]
    assert len(result.outputs[0].token_ids) > 0
print(sorted({"torch", "grpc", "fastapi"} & {name.split(".")[0] for name in sys.modules}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "llama")


def test_an_llm_in_this_process_imports_neither_torch_nor_servers(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LLM, str(model)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_process_of_up_imports_torch(model: Path) -> None:
    """Covers `up` itself, gateway, router, prefill and decode, after both kinds of worker have
    served.
    """
    options = ("--model", str(model), "--kv-tokens", "2048", "--remote-prefill", "always")
    with Fleet("--prefill", "1", "--decode", "1", *options) as fleet:
        params = {"max_tokens": 4, "ignore_eos": True}
        requests = [ask(f"{count}", range(5, 5 + count), **params) for count in (1, 200)]
        answered = fleet.generate(requests)
        assert [len(answered[one.key]) for one in requests] == [4, 4]
        assert (fleet.prefills("local"), fleet.prefills("remote")) == (1, 1)
        up = psutil.Process(fleet.process.pid)
        family = [up, *up.children(recursive=True)]
        (server,) = (process for process in family if process.name() == "fork server")
        assert server.num_threads() == 1
        forked = sorted(process.name() for process in server.children())
        assert forked == ["decode 0", "prefill 0", "router"]
        assert [process.name() for process in family if has_torch(process)] == []
    assert has_torch(psutil.Process()), "these tests have imported it to write the model"


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def test_without_torch_the_extra_is_named(model: Path) -> None:
    cases = (
        (["--kernels", "reference"], "torch"),
        (["--weights", "float32"], "torch"),
        (["--device", "cuda"], "torch,cuda"),
    )
    command = ["decode", "--model", str(model), "--routers", "127.0.0.1:9"]
    commands = [((), command + options) for options, _ in cases]
    results = run_without(
        ["torch"], "pdserve.services.decode.servicer", commands, PDSERVE_CLUSTER_SECRET="x" * 32
    )
    for (code, text), (options, extras) in zip(results, cases, strict=True):
        assert code == 1
        (line,) = [line for line in text.splitlines() if line.startswith("pdserve: ")]
        assert " ".join(options) in line
        assert line.endswith(f"needs torch: pip install 'pdserve[{extras}]'")
