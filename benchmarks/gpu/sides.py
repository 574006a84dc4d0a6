"""The two sides of a hand-off by cuda_ipc: a pool on a device, decode's taker, and child processes.

    sides.py prefill|decode --folder FOLDER --blocks N [--fake]

prefill: for each line `name address incarnation seed rounds` on stdin, send the pool; `flood` for
rounds: until it is killed. decode: listen, print the incarnation, take frames until it is killed.
"""

import argparse
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

READY = 10  # children that start while others are killed


def spec_of() -> Any:
    """A spec like Llama 3 8B's: 32 layers of 8 heads of 128 in bf16; 128 KiB per block and
    layer."""
    from pdserve.engine.kv import KvSpec, LayerGroup

    return KvSpec(32, (LayerGroup(tuple(range(32)), "full", 0, 8, 128, "bfloat16", 0, 8),))


class Side:
    """A device, a pool on it, and the transports of one process."""

    def __init__(self, fake: bool, folder: str, blocks: int, spec: Any = None) -> None:
        """`spec` defaults to spec_of."""
        import torch

        from pdserve.engine.handoff.protocol import TagKey
        from pdserve.engine.kv.torch_cache import DeviceKvCache, TorchKvCache
        from pdserve.engine.transport import TransportOptions
        from pdserve.engine.transport.base import transports

        self.torch, self.fake, self.folder = torch, fake, folder
        self.spec = spec or spec_of()
        self.where = "cpu" if fake else "cuda"
        self.kv = (TorchKvCache if fake else DeviceKvCache)(self.spec, [blocks])
        self.pools = [torch.as_tensor(data) for data in self.kv.data]  # sharing their memory
        self.device = self._open(fake)
        self.num_windows = 0  # that were created
        self._count_windows()
        self.key = TagKey(bytes(32))
        size = (4 << 20) if fake else (32 << 20)
        self.options = TransportOptions("127.0.0.1:0", folder, 1 << 20, lambda: self.device, size)
        self.transports = {n: transports()[n](self.options) for n in ("cuda_ipc", "tcp")}

    def _open(self, fake: bool) -> Any:
        if fake:
            from fakes.device import FakeDevice

            return FakeDevice()
        from pdserve.engine.transport.cuda_ipc import opener

        open_device = opener(self.kv, encrypted=False)
        assert open_device is not None
        return open_device()

    def _count_windows(self) -> None:
        allocate, least = self.device.allocate, 1 << 20

        def counted(size: int) -> Any:
            self.num_windows += size > least
            return allocate(size)

        self.device.allocate = counted

    def filled(self, seed: int, blocks: int) -> Any:
        """The first group of a pool of this many blocks after `fill`."""
        data = self.pools[0]
        shape = (data.shape[0], blocks + 1, *data.shape[2:])
        made = self.torch.empty(shape, dtype=data.dtype, device=self.where)
        self._fill(made, seed)
        return made

    def fill(self, seed: int) -> None:
        """Fill the pool with numbers that are the same in every process of this machine."""
        for data in self.pools:
            self._fill(data, seed)

    def _fill(self, data: Any, seed: int) -> None:
        generator = self.torch.Generator(self.where).manual_seed(seed)
        words = data.view(self.torch.int16)
        words.copy_(
            self.torch.randint(
                -30000, 30000, words.shape, generator=generator,
                device=self.where, dtype=self.torch.int16,
            )
        )  # fmt: skip

    def clear(self) -> None:
        for data in self.pools:
            data.zero_()

    def equal(self, one: Any, other: Any) -> bool:
        """Compare bit for bit: random bits may be NaN."""
        words = self.torch.int16
        return bool(self.torch.equal(one.view(words), other.view(words)))

    def alive(self) -> bool:
        """Whether the context still computes."""
        return int(self.torch.arange(1000, device=self.where).sum()) == 499_500

    def wait(self) -> None:
        if self.where == "cuda":
            self.torch.cuda.synchronize()


class Taker:
    """decode's handler: frames wait in a queue for the thread that owns the pool."""

    def __init__(self, side: Side) -> None:
        from systems.link_ends import Recorder

        self._side = side
        self.recorder = Recorder()
        self.arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links: list[Any] = []
        self.covered: set[tuple[int, int]] = set()  # layers and blocks that were taken
        self.first = 0.0

    def introduced(self, link: Any, hello: Any) -> str:
        return ""

    def message(self, link: Any, message: Any) -> None:
        self.recorder.message(link, message)

    def frame(self, link: Any, header: Any, covered: bytes, tag: bytes) -> bool:
        self.first = self.first or time.perf_counter()
        return True

    def payload(self, link: Any, header: Any, payload: Any) -> None:
        private = isinstance(payload, memoryview)  # valid until this returns
        self.arrived.put((link, header, memoryview(bytearray(payload)) if private else payload))

    def closed(self, link: Any, reason: str) -> None:
        self.recorder.closed(link, reason)

    def take(self, count: int, timeout_s: float = 60.0) -> tuple[int, int]:
        """Copy the next `count` frames into the pool; returns (taken, damaged). Copies overlap."""
        side, copies, taken, damaged = self._side, [], 0, 0
        end = time.monotonic() + timeout_s
        begun = 0
        while taken + damaged < count:
            assert time.monotonic() < end, f"{taken} frames of {count}"
            while begun < count:
                try:
                    link, header, payload = self.arrived.get(block=not copies, timeout=1.0)
                except queue.Empty:
                    break
                blocks = blocks_of(side, header)
                begun += 1
                if isinstance(payload, memoryview):
                    side.kv.write(header.group, header.layers, blocks, payload)
                    taken += 1
                    continue
                while not payload.ready():
                    assert time.monotonic() < end, f"frame {begun}: an event that does not end"
                pages = side.kv.pages(header.group, header.layers, blocks, side.kv.ready())
                key = side.key.copy_key(header.sequence)
                copies.append((link, header, payload.copy_in(pages, key)))
            while copies and copies[0][2].done():
                link, header, copy = copies.pop(0)
                taken, damaged = taken + copy.intact, damaged + (not copy.intact)
                self.covered |= {(n, b) for n in header.layers for b in blocks_of(side, header)}
                link.credit(header)
        return taken, damaged


def blocks_of(side: Side, header: Any) -> list[int]:
    """The blocks of a frame's tokens: block 0 of a pool is unused."""
    size = side.spec.block_size
    return list(range(header.tokens.start // size + 1, header.tokens.stop // size + 1))


def listen(side: Side, name: str, incarnation: bytes, taker: Taker) -> Any:
    from pdserve.engine.handoff.connection import DataLink

    def accept(wire: Any) -> None:
        taker.links.append(DataLink(wire, name, taker))
        taker.links[-1].accept()

    return side.transports[name].listen(incarnation, accept)


def dial(side: Side, name: str, address: str, incarnation: bytes) -> Any:
    from systems.link_ends import HELLO, Recorder, claim_record

    from pdserve.engine.handoff.connection import DataLink
    from pdserve.engine.transport import Target

    wire = side.transports[name].dial(Target(address, incarnation), 10.0)
    hello = replace(HELLO, transport=name, decode_incarnation=incarnation)
    link = DataLink.dial(wire, name, Recorder(), hello, 10.0)
    link.post(claim_record())
    return link


def pieces(side: Side, link: Any, num_blocks: int) -> list[Any]:
    """Frames of the first blocks of the pool."""
    from pdserve.engine.handoff.protocol import cut

    return list(cut(side.spec, 0, range(num_blocks), link.slot_bytes))


def push(side: Side, link: Any, piece: Any, sequence: int) -> None:
    from systems.link_ends import TICKET

    from pdserve.engine.handoff.protocol import TAG_BYTES, FrameHeader
    from pdserve.engine.transport import Frame

    blocks = [block + 1 for block in piece.blocks]  # block 0 of a pool is unused
    size = side.kv.num_bytes(0, piece.layers, blocks)
    pages = side.kv.pages(0, piece.layers, blocks, side.kv.ready())
    heads = range(side.spec.groups[0].num_kv_heads)

    @contextmanager
    def build(slot: int, sink: Any) -> Iterator[Any]:
        parts: list[memoryview] = []
        if sink is None:
            parts = side.kv.read(0, piece.layers, blocks)
        else:
            sink.copy_out(pages, side.key.copy_key(sequence))
        size_tokens = side.spec.block_size
        tokens = range(piece.blocks.start * size_tokens, piece.blocks.stop * size_tokens)
        header = FrameHeader(
            TICKET, sequence, slot, 0, piece.layers, tokens, heads, size, bytes(TAG_BYTES)
        )
        yield Frame(header.pack() + bytes(TAG_BYTES), parts)

    link.push(build)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("prefill", "decode"))
    parser.add_argument("--folder", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--fake", action="store_true")
    options = parser.parse_args()
    side = Side(options.fake, options.folder, options.blocks)
    if options.kind == "decode":
        incarnation = os.urandom(16)
        taker = Taker(side)
        listen(side, "cuda_ipc", incarnation, taker)
        say(incarnation.hex())
        while True:
            taker.take(1, 3600.0)
            say("frame")
    say("ready")
    for line in sys.stdin:
        name, address, incarnation, seed, rounds = line.split()
        side.fill(int(seed))
        side.wait()
        link = dial(side, name, "" if address == "-" else address, bytes.fromhex(incarnation))
        sequence, parts = 0, pieces(side, link, side.kv.num_blocks[0])
        for number in range(1 << 30 if rounds == "flood" else int(rounds)):
            if number and rounds != "flood":
                assert sys.stdin.readline() == "again\n"
            for piece in parts:
                while rounds == "flood" and len(link._jobs) > 32 and link.open:
                    time.sleep(0.001)
                push(side, link, piece, sequence)
                sequence += 1


def say(line: str) -> None:
    print(line, flush=True)


class Children:
    """Processes of one kind, started ahead: most of a start is imports and a CUDA context."""

    def __init__(self, side: Side, kind: str, blocks: int, ahead: int) -> None:
        self._command = [sys.executable, __file__, kind, "--folder", side.folder]
        self._command += ["--blocks", str(blocks), *(["--fake"] if side.fake else [])]
        self._ahead = ahead
        self._waiting: list[subprocess.Popen[str]] = []

    def next(self, more: int) -> tuple["subprocess.Popen[str]", str]:
        """A child and its first line; `more` is the number of further requests to expect."""
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


if __name__ == "__main__":
    main()
