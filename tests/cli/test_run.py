"""`pdserve run`: answers, and a system that ends with the command, however that ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from builders.tiny_models import shipped_model
from systems.eventually import LIMIT_S

from pdserve.cli.main import main
from pdserve.cli.up.stop_limit import stop_limit_s

SMALL = ("--prefill", "0", "--threads", "1", "--kv-tokens", "2048", "--chunk-size", "128")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, capture_errors: bool = False) -> "subprocess.Popen[str]":
        made = subprocess.Popen(
            [sys.executable, "-m", "pdserve.cli.main", *words, *SMALL],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if capture_errors else None,
            text=True,
        )
        started.append(made)
        return made

    yield start
    for made in started:
        with made:
            made.kill()


def test_questions_are_answered_and_nothing_is_left(
    run: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"other:sha256:{'0' * 64}\n")
    words = (
        "--api-key-file",
        str(keys),
        "--prompts",
        "Say one. | Say two.",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
    )
    command = run("run", *words)
    out, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 0
    first, second = out.split("> Say two.\n")
    assert first.startswith("> Say one.\n")
    assert first.removeprefix("> Say one.\n").strip()
    assert second.strip()
    assert list(tmp_path.glob("pdserve*")) == []


def test_the_system_ends_with_a_killed_command(
    run: Callable[..., "subprocess.Popen[str]"],
) -> None:
    command = run(
        "chat", "-m", str(shipped_model()), "--max-tokens", "4"
    )  # `chat` that loads a model is `run`
    assert command.stdin
    assert command.stdout
    command.stdin.write("Say one.\n")
    command.stdin.flush()
    assert command.stdout.readline().strip()
    children = psutil.Process(command.pid).children(recursive=True)
    assert len(children) >= 4
    command.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


def test_a_model_that_cannot_be_loaded(
    run: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    command = run("run", "nowhere", "hello")
    out, _ = command.communicate(timeout=LIMIT_S)
    assert (command.returncode, out) == (1, "")
    assert list(tmp_path.glob("pdserve*")) == []


def test_what_cannot_be_served_ends_in_one_sentence(
    run: Callable[..., "subprocess.Popen[str]"], subtests: pytest.Subtests, tmp_path: Path
) -> None:
    """It is found before any process that serves is started."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    for words, sentence in {
        ("--isq", "q9"): "--isq: quantization type 'q9' is not supported; supported: q4_0, ",
        ("--native-isa", "sse9"): "--native-isa: this machine has no kernels for 'sse9'; it has ",
        ("no/such.gguf",): "no model 'no/such.gguf': neither an existing GGUF file or directory ",
        (str(tmp_path / "adapter"),): f"{tmp_path}/adapter is an adapter (LoRA), which pdserve ",
    }.items():
        with subtests.test(words[0]):
            command = run("up", *words, "--port", "0", capture_errors=True)
            out, err = command.communicate(timeout=LIMIT_S)
            assert (command.returncode, out) == (1, "")
            (line,) = err.splitlines()
            assert line.startswith(f"pdserve up: {sentence}")


def test_contradictory_options(run: Callable[..., "subprocess.Popen[str]"]) -> None:
    command = run("run", "hello", "--remote-prefill", "always", capture_errors=True)
    out, err = command.communicate(timeout=LIMIT_S)
    assert (command.returncode, out) == (2, "")
    assert err.splitlines()[-1].endswith("it needs a prefill worker")
    assert "Traceback" not in err


def test_the_stop_limit_covers_the_drain_of_every_stage() -> None:
    assert stop_limit_s(100.0) - stop_limit_s(0.0) == 4 * 100.0


def test_help_names_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert capsys.readouterr().out.startswith("usage: pdserve run [model] [prompt ...] [options]")
