"""Logits after a hand-off by cuda_ipc: another process computes prompts and hands its pool over,
and the following steps here have the bits of steps over keys that were computed here."""

import os
import subprocess
import sys

import numpy as np
from part import MeasuredPart, fake_device, own_stream, run
from random_models import FAKE_QWEN3, QWEN3_0_6B, random_decoder
from sequences import BLOCK_SIZE, Row, Sequences, drawn_tokens, same_bits
from sides import Side, Taker, dial, listen, pieces, push, say

from pdserve.engine.kv import KvSpec, blocks_for

COUNT, LONGEST, CHUNK = 64, 400, 4096
FAKE_COUNT, FAKE_LONGEST = 2, 20
TAKE_S = 60.0


class Prompts:
    """The same prompts in both processes, over the pool of one side."""

    def __init__(self, fake: bool, folder: str) -> None:
        count, longest = (FAKE_COUNT, FAKE_LONGEST) if fake else (COUNT, LONGEST)
        decoder = random_decoder(FAKE_QWEN3 if fake else QWEN3_0_6B, "cpu" if fake else "cuda")
        spec = KvSpec(BLOCK_SIZE, decoder.kv_groups)
        self.side = Side(fake, folder, count * blocks_for(longest + 1, BLOCK_SIZE), spec)
        tokens = drawn_tokens(count, longest + 1, decoder.config.vocab_size)
        self.sequences = Sequences(decoder, self.side.kv, tokens)
        self.lens = list(map(int, np.random.default_rng(2).integers(2, longest + 1, count)))

    def compute(self) -> None:
        for number, length in enumerate(self.lens):
            self.sequences.hidden([Row(number, 0, length)])
        self.side.wait()

    def step(self) -> object:
        """Logits of the token after each prompt."""
        return self.sequences.logits([Row(n, end, end + 1) for n, end in enumerate(self.lens)])


def measure(part: MeasuredPart) -> None:
    prompts = Prompts(part.fake, str(part.folder))
    side = prompts.side
    prompts.compute()
    expected = prompts.step()
    side.clear()
    side.wait()
    without = same_bits(prompts.step(), expected)
    side.clear()
    side.wait()
    incarnation, taker = os.urandom(16), Taker(side)
    listener = listen(side, "cuda_ipc", incarnation, taker)
    words = [sys.executable, __file__, "child", str(part.folder), incarnation.hex()]
    words += ["fake"] if part.fake else []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            frames = int(other.stdout.readline())
            taken, damaged = taker.take(frames, TAKE_S)
            side.wait()
        finally:
            other.kill()
    listener.close()
    same = same_bits(prompts.step(), expected)
    part.note(sequences=len(prompts.lens), frames=frames, taken=taken, damaged=damaged)
    part.note(same_bits=same, same_bits_without_keys=without)


def child() -> None:
    """The prefill side: `child FOLDER INCARNATION [fake]`; prints the number of frames it sends."""
    folder, incarnation, fake = sys.argv[2], bytes.fromhex(sys.argv[3]), "fake" in sys.argv[4:]
    fake_device() if fake else own_stream()
    prompts = Prompts(fake, folder)
    prompts.compute()
    side = prompts.side
    link = dial(side, "cuda_ipc", "", incarnation)
    parts = pieces(side, link, side.kv.num_blocks[0])
    say(str(len(parts)))
    for number, piece in enumerate(parts):
        push(side, link, piece, number)
    sys.stdin.read()  # until it is killed: the frames are still being sent


if __name__ == "__main__":
    child() if sys.argv[1] == "child" else run(measure)
