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
import contextlib
import importlib.util
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/check-site"
READY = 6  # children that start while others are killed
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
    return child(options) if options.child else check(options)


def build_and_go_on(options: argparse.Namespace) -> int:
    wheels = sorted((ROOT / options.wheels).glob("*.whl"))
    if importlib.util.find_spec("cryptography") is None and wheels:
        run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", SITE, *wheels)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in (".src", "tests/support", SITE)),
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


# with everything importable


def spec_of() -> Any:
    """As Llama 3 8B: 32 layers of 8 heads of 128 in bf16; 128 KiB a block and layer."""
    from pdserve.engine.kv_spec import KvSpec, LayerGroup

    return KvSpec(32, (LayerGroup(tuple(range(32)), "full", 0, 8, 128, "bfloat16", 0, 8),))


class Side:
    """A device, a pool on it, and the transports of one process."""

    def __init__(self, fake: bool, folder: str, blocks: int) -> None:
        import torch

        from pdserve.engine.handoff.keys import TagKey
        from pdserve.engine.kv_cache import KvCache
        from pdserve.engine.transport.base import TransportOptions
        from pdserve.engine.transport.registry import transports

        self.torch = torch
        self.spec = spec_of()
        self.where = "cpu" if fake else "cuda"
        self.kv = KvCache(self.spec, blocks, self.where)
        self.device = self._open(fake)
        self.key = TagKey(bytes(32))
        size = (4 << 20) if fake else (32 << 20)
        self.options = TransportOptions("127.0.0.1:0", folder, 1 << 20, lambda: self.device, size)
        self.transports = {n: transports()[n](self.options) for n in ("cuda_ipc", "tcp")}

    def _open(self, fake: bool) -> Any:
        if fake:
            from fake_device import FakeDevice

            return FakeDevice()
        from pdserve.engine.transport.cuda_device import opener

        open_device = opener(self.kv, encrypted=False)
        assert open_device is not None
        return open_device()

    def fill(self, seed: int) -> None:
        """The same numbers in every process of this machine."""
        for data in self.kv.data:
            generator = self.torch.Generator(self.where).manual_seed(seed)
            words = data.view(self.torch.int16)
            words.copy_(
                self.torch.randint(
                    -30000, 30000, words.shape, generator=generator,
                    device=self.where, dtype=self.torch.int16,
                )
            )  # fmt: skip

    def clear(self) -> None:
        for data in self.kv.data:
            data.zero_()

    def equal(self, one: Any, other: Any) -> bool:
        """Bit for bit: random bits are not all numbers."""
        words = self.torch.int16
        return bool(self.torch.equal(one.view(words), other.view(words)))

    def alive(self) -> bool:
        """The context still computes."""
        return int(self.torch.arange(1000, device=self.where).sum()) == 499_500

    def wait(self) -> None:
        if self.where == "cuda":
            self.torch.cuda.synchronize()


class Taker:
    """decode's handler: frames wait in a queue for the thread that owns the pool."""

    def __init__(self, side: Side) -> None:
        from link_ends import Recorder

        self._side = side
        self.recorder = Recorder()
        self.arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links: list[Any] = []
        self.first = 0.0

    def introduced(self, link: Any, hello: Any) -> str:
        return ""

    def message(self, link: Any, message: Any) -> None:
        self.recorder.message(link, message)

    def frame(self, link: Any, header: Any, covered: bytes, tag: bytes) -> bool:
        self.first = self.first or time.perf_counter()
        return True

    def payload(self, link: Any, header: Any, payload: Any) -> None:
        self.arrived.put((link, header, payload))

    def closed(self, link: Any, reason: str) -> None:
        self.recorder.closed(link, reason)

    def take(self, count: int, timeout_s: float = 60.0) -> tuple[int, int]:
        """The next `count` frames into the pool: (taken, damaged). Copies overlap."""
        side, flights, taken, damaged = self._side, [], 0, 0
        end = time.monotonic() + timeout_s
        begun = 0
        while taken + damaged < count:
            assert time.monotonic() < end, f"{taken} frames of {count}"
            while begun < count:
                try:
                    link, header, payload = self.arrived.get(block=not flights, timeout=1.0)
                except queue.Empty:
                    break
                blocks = list(range(header.tokens.start // 32 + 1, header.tokens.stop // 32 + 1))
                begun += 1
                if isinstance(payload, memoryview):
                    side.kv.write(header.group, header.layers, blocks, payload)
                    link.credit(header.slot)
                    taken += 1
                    continue
                while not payload.ready():
                    assert time.monotonic() < end, "an event that does not end"
                pages = side.kv.pages(header.group, header.layers, blocks)
                key = side.key.copy_key(header.sequence)
                flights.append((link, header, payload.copy_in(pages, key)))
            while flights and flights[0][2].done():
                link, header, copy = flights.pop(0)
                taken, damaged = taken + copy.intact, damaged + (not copy.intact)
                link.credit(header.slot)
        return taken, damaged


def listen(side: Side, name: str, boot: bytes, taker: Taker) -> Any:
    from pdserve.engine.transport.link import Link

    def accept(wire: Any) -> None:
        taker.links.append(Link(wire, name, taker))
        taker.links[-1].accept()

    return side.transports[name].listen(boot, accept)


def dial(side: Side, name: str, address: str, boot: bytes) -> Any:
    from link_ends import HELLO, Recorder, claim_record

    from pdserve.engine.transport.base import Target
    from pdserve.engine.transport.link import Link

    wire = side.transports[name].dial(Target(address, boot), 10.0)
    hello = replace(HELLO, transport=name, decode_boot=boot)
    link = Link.dial(wire, name, Recorder(), hello, 10.0)
    link.post(claim_record())
    return link


def pieces(side: Side, link: Any) -> list[Any]:
    from pdserve.engine.handoff.layout import cut

    return list(cut(side.spec, 0, range(side.kv.num_blocks), link.slot_bytes))


def push(side: Side, link: Any, piece: Any, sequence: int) -> None:
    from link_ends import TICKET

    from pdserve.engine.handoff.frames import TAG_BYTES, FrameHeader

    blocks = [block + 1 for block in piece.blocks]  # block 0 of a pool is nobody's
    size = side.kv.num_bytes(0, piece.layers, blocks)
    pages = side.kv.pages(0, piece.layers, blocks)

    def build(slot: int, space: Any) -> tuple[bytes, int]:
        if isinstance(space, memoryview):
            side.kv.read(0, piece.layers, blocks, space[:size])
        else:
            space.copy_out(pages, side.key.copy_key(sequence))
        tokens = range(piece.blocks.start * 32, piece.blocks.stop * 32)
        header = FrameHeader(
            TICKET, sequence, slot, 0, piece.layers, tokens, range(8), size, bytes(TAG_BYTES)
        )
        return header.pack() + bytes(TAG_BYTES), size

    link.push(build)


def child(options: argparse.Namespace) -> int:
    """prefill: for each line `name address boot seed rounds` on stdin, hands the pool over; `flood`
    for rounds: until it is killed. decode: listens, says its boot id, takes frames until killed."""
    side = Side(options.fake, options.folder, options.blocks)
    if options.child == "decode":
        boot = os.urandom(16)
        taker = Taker(side)
        listen(side, "cuda_ipc", boot, taker)
        say(boot.hex())
        while True:
            taker.take(1, 3600.0)
            say("frame")
    say("ready")
    for line in sys.stdin:
        name, address, boot, seed, rounds = line.split()
        side.fill(int(seed))
        side.wait()
        link = dial(side, name, "" if address == "-" else address, bytes.fromhex(boot))
        sequence, parts = 0, pieces(side, link)
        for number in range(1 << 30 if rounds == "flood" else int(rounds)):
            if number and rounds != "flood":
                assert sys.stdin.readline() == "again\n"
            for piece in parts:
                while rounds == "flood" and len(link._jobs) > 32 and link.open:
                    time.sleep(0.001)
                push(side, link, piece, sequence)
                sequence += 1
    return 0


def say(line: str) -> None:
    print(line, flush=True)


class Children:
    """Processes of one kind, started ahead: most of a start is imports and a CUDA context."""

    def __init__(self, options: argparse.Namespace, kind: str, blocks: int, ahead: int) -> None:
        self._command = [
            sys.executable, __file__, "--built", "--child", kind, "--folder", options.folder,
            "--blocks", str(blocks), *(["--fake"] if options.fake else []),
        ]  # fmt: skip
        self._ahead = ahead
        self._waiting: list[subprocess.Popen[str]] = []

    def next(self, more: int) -> tuple["subprocess.Popen[str]", str]:
        """A child and its first line; `more`: how many will be asked for after it."""
        while len(self._waiting) < min(self._ahead, more + 1):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._waiting.append(subprocess.Popen(self._command, text=True, **pipes))
        found = self._waiting.pop(0)
        assert found.stdout is not None
        return found, found.stdout.readline().strip()

    def close(self) -> None:
        for one in self._waiting:
            one.kill()
            one.communicate()


def tell(process: Any, *words: object) -> None:
    process.stdin.write(" ".join(map(str, words)) + "\n")
    process.stdin.flush()


def check(options: argparse.Namespace) -> int:
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


def over(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def run_tests() -> str:
    command = [sys.executable, "-m", "pytest", "-q", *TESTS]
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    return "failed" if done.returncode else "passed"


def hashes(side: Side) -> dict[str, Any]:
    """The device's tag of random blocks is the host's; a changed bit in the slot is found."""
    import numpy as np

    from pdserve.engine.transport.device import Slot
    from pdserve.kernels import _native
    from pdserve.kernels.copy_hash import TAG_BYTES, expand_key

    rng = random.Random(1)
    capacity = side.options.device_slot_bytes
    memory = side.device.allocate(capacity + 256)
    slot = Slot(memory.address, capacity, side.device.make_signal())
    side.fill(1)
    compared = equal = found = 0
    block_bytes = side.spec.groups[0].block_bytes(32)
    for number in range(20):
        layers = range(rng.randrange(0, 8), rng.randrange(8, 17))
        most = min(side.kv.num_blocks, capacity // (len(layers) * block_bytes))
        blocks = rng.sample(range(1, side.kv.num_blocks + 1), rng.randrange(1, most + 1))
        pages, key = side.kv.pages(0, layers, blocks), side.key.copy_key(number)
        side.device.copy_out(pages, slot, key).wait()
        tag = side.device.get(memory.address + capacity, TAG_BYTES)
        payload = bytearray(pages.num_bytes)
        side.kv.read(0, layers, blocks, memoryview(payload))
        data, copied = np.frombuffer(payload, np.uint8), np.zeros(len(payload), np.uint8)
        numbers = _native.copy_and_hash(
            data, len(payload), len(payload), 0, 1, np.zeros(1, np.int32), copied,
            expand_key(key), True,
        )  # fmt: skip
        compared += 1
        equal += tag == b"".join(n.to_bytes(8, "little") for n in numbers)
        copy = side.device.copy_in(pages, slot, key)
        copy.wait()
        equal -= not copy.intact
        at = memory.address + rng.randrange(len(payload))
        changed = bytes([side.device.get(at, 1)[0] ^ 1 << rng.randrange(8)])
        side.device.put(at, changed)
        copy = side.device.copy_in(pages, slot, key)
        copy.wait()
        found += not copy.intact
    whole = side.kv.pages(0, range(32), list(range(1, capacity // (32 * block_bytes) + 1)))
    speed = {}
    for name, give in (
        ("pool_to_slot", side.device.copy_out),
        ("slot_to_pool", side.device.copy_in),
    ):
        give(whole, slot, bytes(32)).wait()
        start = time.perf_counter()
        for _ in range(20):
            last = give(whole, slot, bytes(32))
        last.wait()
        speed[f"{name}_gb_s"] = 20 * whole.num_bytes / (time.perf_counter() - start) / 1e9
    side.device.release(slot)
    slot.signal.close()
    memory.close()
    right = equal == compared == found
    return {"compared": compared, "equal": right, "changed_bits_found": found, **speed}


def transfers(options: argparse.Namespace, side: Side) -> dict[str, Any]:
    """A whole pool from another process by both transports: bytes and times."""
    result: dict[str, Any] = {}
    side.fill(7)
    expected = [data.clone() for data in side.kv.data]
    total = sum(data[:, 1:].numel() * data.element_size() for data in expected)
    start_copy = [data.clone() for data in expected]
    side.wait()
    start = time.perf_counter()
    for _ in range(10):
        for source, target in zip(expected, start_copy, strict=True):
            target.copy_(source)
    side.wait()
    bytes_copied = 10 * sum(d.numel() * d.element_size() for d in expected)
    result["device_to_device_gb_s"] = bytes_copied / (time.perf_counter() - start) / 1e9
    del start_copy
    children = Children(options, "prefill", options.blocks, 1)
    equal = True
    for name in ("cuda_ipc", "tcp"):
        boot, taker = os.urandom(16), Taker(side)
        listener = listen(side, name, boot, taker)
        process, _ = children.next(0)
        address = listener.address if name == "tcp" else "-"
        speeds = []
        tell(process, name, address, boot.hex(), 7, options.rounds)
        for number in range(options.rounds):
            side.clear()
            side.wait()
            taker.first = 0.0
            if number:
                tell(process, "again")
            first = taker.arrived.get(timeout=120)
            taker.arrived.put(first)  # now it is known how large its frames are
            count = -(-total // first[1].payload_bytes)
            taken, damaged = taker.take(count)
            side.wait()
            speeds.append(total / (time.perf_counter() - taker.first) / 1e9)
            pairs = zip(expected, side.kv.data, strict=True)
            same = all(side.equal(a[:, 1:], b[:, 1:]) for a, b in pairs)
            equal = equal and same and damaged == 0 and taken == count
        process.kill()
        process.communicate()
        listener.close()
        result[f"{name}_gb_s"] = sorted(speeds)
    result["equal"] = equal
    result["bytes"] = total
    best = result["cuda_ipc_gb_s"][-1]
    result["of_device_to_device"] = best / result["device_to_device_gb_s"]
    return result


def kill_prefill(options: argparse.Namespace, side: Side) -> dict[str, int]:
    """Half of the kills: prefill floods the window and dies; decode's context goes on."""
    boot, taker, rng = os.urandom(16), Taker(side), random.Random(2)
    listener = listen(side, "cuda_ipc", boot, taker)
    children = Children(options, "prefill", 8, READY)
    survived = frames = damaged = 0
    count = options.kills // 2
    for number in range(count):
        process, _ = children.next(count - number - 1)
        tell(process, "cuda_ipc", "-", boot.hex(), number, "flood")
        taken, bad = taker.take(rng.randrange(1, 40))
        process.kill()
        process.communicate()
        ended = over(lambda n=number: len(taker.links) > n and all(x.ended for x in taker.links))
        with contextlib.suppress(queue.Empty):
            while True:
                taker.arrived.get_nowait()  # of the dead one
        frames, damaged = frames + taken, damaged + bad
        survived += side.alive() and ended and not bad
    children.close()
    listener.close()
    return {"kills": count, "survived": survived, "frames": frames, "damaged": damaged}


def kill_decode(options: argparse.Namespace, side: Side) -> dict[str, int]:
    """The other half: decode takes frames and dies with its window; prefill's context goes on."""
    rng = random.Random(3)
    children = Children(options, "decode", 8, READY)
    survived = frames = 0
    count = options.kills - options.kills // 2
    for number in range(count):
        process, boot = children.next(count - number - 1)
        link = dial(side, "cuda_ipc", "", bytes.fromhex(boot))
        few = [p for p in pieces(side, link) if p.blocks.stop <= 8]
        for sequence in range(60):
            push(side, link, few[sequence % len(few)], sequence)
        for _ in range(rng.randrange(1, 30)):
            assert process.stdout is not None
            frames += process.stdout.readline() == "frame\n"
        process.kill()
        process.communicate()
        ended = over(lambda link=link: link.ended)
        link.close()
        survived += side.alive() and ended
    children.close()
    return {"kills": count, "survived": survived, "frames": frames}


if __name__ == "__main__":
    sys.exit(main())
