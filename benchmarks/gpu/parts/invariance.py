"""Logits of 64 sequences have the same bits alone, in every batch and in every cut of their
prompts, when they continue after their keys were recomputed, and from recorded steps; also those of
16 of a mixture of experts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from part import MeasuredPart, run
from random_models import (
    FAKE_MOE,
    FAKE_QWEN3,
    QWEN3_0_6B,
    QWEN3_MOE,
    make_recorder,
    random_decoder,
)
from sequences import BLOCK_SIZE, Row, Sequences, drawn_tokens, make_pool
from torch import Tensor

from pdserve.engine.kv import blocks_for


class Sizes(NamedTuple):
    """Sizes of the comparison."""

    sequences: int  # whose logits are compared
    rows: int  # including rows that only fill the batch
    prompt: int  # the longest
    new: int  # tokens after each prompt
    step: int  # maximum tokens
    batches: tuple[int, ...]
    chunks: tuple[int, ...]


WHOLE = Sizes(64, 256, 2100, 4, 8192, (2, 16, 64, 256), (64, 256, 512, 2048))
FEWER = Sizes(16, 64, 700, 2, 8192, (2, 16, 64), (64, 256, 2048))
FAKE = Sizes(3, 4, 20, 2, 64, (2, 4), (5, 64))
FAKE_SMALLEST = Sizes(2, 2, 6, 1, 64, (2,), (4,))


class Case:
    """A way to split prompts into steps."""

    def __init__(self, sequences: Sequences, sizes: Sizes, lens: list[int]) -> None:
        self.sequences, self.sizes, self.lens = sequences, sizes, lens

    def run(self, batch: int, chunk: int, numbers: Sequence[int], resumed: int = 0) -> Tensor:
        """float32 [sequences, 1 + new, vocab]: logits of the last token of each prompt and of the
        tokens after it. `resumed`: this many new tokens are computed as a part of the prompt."""
        self.sequences.clear()
        new, vocab = self.sizes.new, self.sequences.decoder.config.vocab_size
        found = torch.zeros(self.sizes.sequences, 1 + new, vocab)
        for first in range(0, len(numbers), batch):
            done = dict.fromkeys(numbers[first : first + batch], 0)
            while done:
                rows = self._step(done, chunk, resumed)
                for row, logits in zip(rows, self.sequences.logits(rows).cpu(), strict=True):
                    done[row.sequence] = row.end
                    at = row.end - self.lens[row.sequence]
                    if at >= 0 and row.sequence < len(found):
                        found[row.sequence, at] = logits
                    if at == new:
                        del done[row.sequence]
        return found[:, resumed:]

    def _step(self, done: dict[int, int], chunk: int, resumed: int) -> list[Row]:
        rows, left = [], self.sizes.step
        for number, start in done.items():
            prompt = self.lens[number] + resumed
            end = min(start + chunk, prompt) if start < prompt else start + 1
            if end - start <= left:
                rows.append(Row(number, start, end))
                left -= end - start
        return sorted(rows, key=lambda row: row.end - row.start > 1)


def prompt_lens(sizes: Sizes) -> list[int]:
    """Lengths of short and long prompts."""
    rng = np.random.default_rng(1)
    lens = np.exp(rng.uniform(np.log(2), np.log(sizes.prompt), sizes.rows)).astype(int)
    lens[0] = sizes.prompt
    return [int(n) for n in lens]


def measure(part: MeasuredPart) -> None:
    fake = FAKE_SMALLEST if part.smallest else FAKE
    compare_steps(part, "", FAKE_QWEN3 if part.fake else QWEN3_0_6B, fake if part.fake else WHOLE)
    compare_steps(
        part, "experts in ", FAKE_MOE if part.fake else QWEN3_MOE, fake if part.fake else FEWER
    )


def compare_steps(part: MeasuredPart, label: str, hf_config: dict[str, Any], sizes: Sizes) -> None:
    decoder = random_decoder(hf_config, part.device)
    most, lens = sizes.prompt + sizes.new, prompt_lens(sizes)
    whole = [n + sizes.new for n in lens]
    blocks = sum(blocks_for(n, BLOCK_SIZE) for n in whole)
    kv = make_pool(part.device, decoder.kv_groups, blocks)
    tokens = drawn_tokens(sizes.rows, most, decoder.config.vocab_size)
    case = Case(Sequences(decoder, kv, tokens, whole), sizes, lens)
    compared, everyone = list(range(sizes.sequences)), list(range(sizes.rows))
    alone = case.run(1, most, compared)
    part.note(**{f"{label}logits": alone.numel()})
    part.note(**{f"{label}logits are finite": bool(alone.isfinite().all())})

    def compare(name: str, logits: Tensor, expected: Tensor = alone) -> None:
        num_unlike = (logits.view(torch.int32) != expected.view(torch.int32)).sum()
        part.note(**{f"{label}{name}: differences": int(num_unlike)})

    for chunk in sizes.chunks:
        compare(f"chunks of {chunk}", case.run(1, chunk, compared))
    for number, batch in enumerate(sizes.batches):
        chunk = sizes.chunks[number % len(sizes.chunks)]
        compare(f"batches of {batch}", case.run(batch, chunk, everyone))
    resumed = case.run(sizes.sequences, sizes.chunks[0], compared, resumed=1)
    compare("steps behind a resume", resumed, alone[:, 1:])
    decoder.record(make_recorder(part.device), kv, sizes.rows)
    for batch in (1, sizes.batches[-1]):
        compare(f"graphs of {batch}", case.run(batch, most, everyone))


if __name__ == "__main__":
    run(measure)
