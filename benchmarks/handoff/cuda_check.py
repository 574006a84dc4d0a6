"""Runs cuda_ipc on a GPU, with two processes, and prints one JSON object. It has not been run yet.

    python3 benchmarks/handoff/cuda_check.py [--kills 200] [--blocks 128] [--wheels .whl]

For a machine with a GPU and no network: torch with CUDA, CuPy, nvcc, cmake, nanobind, numpy, pytest
and hypothesis are there; `--wheels` is a folder with wheels of what is not (cryptography, cffi,
pycparser). It builds the native extension, runs the tests of hash and transports, compares the
GPU's tags with the host's, hands a pool over by cuda_ipc and by tcp and compares every byte,
measures both and a device-to-device copy, then kills either side in the middle of copies, `--kills`
times in all, and looks each time whether the other side's context still computes.

`--fake` does the same on the tests' fake device, to try the script; its figures mean nothing.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/check-site"
TESTS = ("tests/kernels/test_copy_hash.py", "tests/engine/transport", "tests/engine/handoff")
RATIO = 0.45  # of a device-to-device copy that cuda_ipc is to reach


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=128, help="of the pool; 4 MiB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wheels", default=".whl")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--built", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.built:
        return build_and_go_on(options)
    return check(options)


def build_and_go_on(options: argparse.Namespace) -> int:
    wheels = sorted((ROOT / options.wheels).glob("*.whl"))
    if importlib.util.find_spec("cryptography") is None and wheels:
        run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", SITE, *wheels)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / p) for p in (".src", "benchmarks", "tests/support", SITE)
        ),
        "PYTHONUNBUFFERED": "1",
    }
    built = [sys.executable, "-c", "from pdserve.kernels._native import copy_and_hash"]
    if subprocess.run(built, env=env, cwd=ROOT, capture_output=True).returncode:
        folder = ROOT / "build/check"
        python = f"-DPython_EXECUTABLE={sys.executable}"
        subprocess.run(["cmake", "-S", ROOT, "-B", folder, python], check=True, stdout=sys.stderr)
        command = ["cmake", "--build", folder, "--target", "_native", "-j", "16"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        for module in (folder / "kernels/native").glob("_native*.so"):
            (ROOT / "kernels" / module.name).write_bytes(module.read_bytes())
    command = [sys.executable, __file__, "--built", *sys.argv[1:]]
    return subprocess.run(command, env=env, cwd=ROOT).returncode


def run(*words: Any) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=sys.stderr)


def check(options: argparse.Namespace) -> int:
    """With everything importable."""
    from handoff.cuda_parts import hashes, kill_decode, kill_prefill, transfers
    from handoff.cuda_sides import Side, child

    if options.child:
        return child(options)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        side = Side(options.fake, folder, options.blocks)
        result: dict[str, Any] = {
            "name": "cuda_check", "fake": options.fake, "device": side.device.name,
            "torch": side.torch.__version__, "window_mib": 8 * side.options.device_slot_bytes >> 20,
        }  # fmt: skip
        result["tests"] = "left out" if options.no_tests else run_tests()
        result["hash"] = hashes(side)
        result["transfer"] = transfers(options, side)
        result["prefill_kills"] = kill_prefill(options, side)
        result["decode_kills"] = kill_decode(options, side)
        result["context_alive"] = side.alive()
        ratio = result["transfer"].get("of_device_to_device", 0.0)
        result["held"] = {
            "tests": result["tests"] in ("passed", "left out"),
            "hash": result["hash"]["equal"],
            "equal_to_tcp": result["transfer"]["equal"],
            "bandwidth": ratio >= RATIO,
            "kills": result["prefill_kills"]["survived"] + result["decode_kills"]["survived"]
            == options.kills,
        }
        for transport in side.transports.values():
            transport.close()
    print(json.dumps(result))
    return 0 if all(result["held"].values()) else 1


def run_tests() -> str:
    command = [sys.executable, "-m", "pytest", "-q", *TESTS]
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    return "failed" if done.returncode else "passed"


if __name__ == "__main__":
    sys.exit(main())
