"""The wheel from the sdist, in an empty environment: `pdserve up` serves a GGUF file from an empty
folder, with what pip installs beside it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders.tiny_models import shipped_model

ROOT = Path(__file__).parents[1]
START_S = 120.0

pytestmark = [pytest.mark.extended, pytest.mark.timeout(3600)]


def run(*words: str | Path, cwd: Path | None = None) -> str:
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and its dependencies alone."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "build", "-o", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "venv")
    programs = folder / "venv/bin"
    run(programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    return programs


@contextmanager
def serving(*words: str | Path, folder: Path) -> Iterator[str]:
    """Run `pdserve up` and yield its URL."""
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(words, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline, found = time.monotonic() + START_S, None
            while not found and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                text = (folder / "output").read_text()
                found = re.search(r"pdserve is ready after .* at (http://\S+)", text)
            assert found, (folder / "output").read_text()
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (folder / "output").read_text()


def test_up_serves_a_gguf_file(environment: Path, tmp_path: Path) -> None:
    words = (environment / "pdserve", "up", "--port", "0", "--model", shipped_model())
    with serving(*words, folder=tmp_path) as url:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
    assert answer["choices"][0]["message"]["content"]
    assert 1 <= answer["usage"]["completion_tokens"] <= 8


def test_the_installation_is_complete(environment: Path, tmp_path: Path) -> None:
    run(environment / "python", "-m", "pip", "check")
    for name in ("cli.chat_terminal", "cli.bench", "gateway.main", "services.decode.servicer"):
        run(environment / "python", "-c", f"import pdserve.{name}", cwd=tmp_path)
    site = run(environment / "python", "-c", "import pdserve; print(pdserve.__path__[0])")
    names = {path.name for path in Path(site.strip()).parent.glob("pdserve-*/licenses/*")}
    assert names == {"LICENSE", "THIRD_PARTY_NOTICES.md"}
    assert not list(Path(site.strip()).rglob("*.cpp"))
