"""The speed of the engine and its steps, relative to the limits of the GPU.

The roofline of a step is the larger of two times: its weights, keys and values at the measured copy
bandwidth, and its products at the measured rate of a large one. Idle is the time from the end of
one recorded step to the start of the next, by events on the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from clock import make_event, seconds_of, wait
from part import MeasuredPart, run
from random_models import (
    FAKE_LLAMA,
    FAKE_QWEN3,
    LLAMA_8B,
    QWEN3_0_6B,
    make_recorder,
    random_decoder,
    step_bytes,
    token_bytes,
)
from sequences import BLOCK_SIZE, Row, Sequences, drawn_tokens, make_pool
from served_engine import ServedEngine
from torch import Tensor

from pdserve.engine.api import Request, SamplingParams
from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import blocks_for
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.cuda import CudaDecoder
from pdserve.kernels.cuda.attention import Rows, paged_attention
from pdserve.kernels.cuda.sampling import CudaSampling

ROWS, SHORTEST, LONGEST, TEMPERATURE = 256, 100, 1024, 0.6  # of prompts, and of answers
CHUNK, STEP_TOKENS = 2048, 8192
PREFILL = 8192  # tokens of the long prompt


@dataclass(slots=True)
class StepRecord:
    """One forward pass."""

    rows: int
    is_decode: bool
    bytes: int
    operations: int
    start: Any = None  # events: of a recorded step
    end: Any = None  # of its sampling


class MeteredDecoder:
    """Record each step of a decoder."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._decoder = decoder
        self.steps: list[StepRecord] = []
        self._weights, self._token = step_bytes(decoder), token_bytes(decoder)
        config = decoder.config
        self._head = config.vocab_size * config.hidden_size
        self._body = self._weights // 2 - self._head
        self._pair = 4 * config.num_layers * config.num_heads * config.head_dim
        self.logits, self.states = decoder.logits, decoder.states
        self.synchronize = decoder.synchronize

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        lens = sum(batch.kv_lens)
        num_tokens, outputs = len(batch.token_ids), len(batch.logit_tokens)
        pairs = int(batch.positions.sum()) + num_tokens
        self.steps.append(
            StepRecord(
                len(batch.kv_lens),
                batch.num_decode_rows == len(batch.kv_lens),
                self._weights + (lens + num_tokens) * self._token,
                2 * self._body * num_tokens + 2 * self._head * outputs + self._pair * pairs,
            )
        )
        return self._decoder.forward(batch, kv)


class TimedSampling(CudaSampling):
    """Record an event after each step's sampling."""

    def __init__(self, stream: Any, device: str, steps: list[StepRecord]) -> None:
        super().__init__(stream)
        self._events, self._device, self._steps = stream, device, steps

    def begin(self, *args: Any) -> Any:
        tokens = super().begin(*args)
        self._steps[-1].end = make_event(self._device)
        self._steps[-1].end.record(self._events)
        return tokens


class TimedRecorder:
    """Record an event before each recorded step."""

    def __init__(self, device: str, steps: list[StepRecord]) -> None:
        self._recorder, self._device, self._steps = make_recorder(device), device, steps

    def record(self, launch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        again = self._recorder.record(launch)

        def replay() -> Tensor:
            self._steps[-1].start = make_event(self._device)
            self._steps[-1].start.record()
            return again()

        return replay


def measure(part: MeasuredPart) -> None:
    facts = part.earlier("facts")
    if "mm_tflop_s" not in facts:
        raise RuntimeError("the part facts has measured no bandwidth and no rate")
    copy, rate = facts["copy_gb_s"] * 1e9, facts["mm_tflop_s"] * 1e12
    decode_attention(part, copy)
    serve(part, copy, rate)
    if not part.smallest:
        single_steps(part, copy, rate)


def decode_attention(part: MeasuredPart, copy: float) -> None:
    rows, keys, heads, kv_heads, dim = (2, 40, 2, 1, 16) if part.fake else (256, 1024, 16, 8, 128)
    width = blocks_for(keys, BLOCK_SIZE)
    device = part.device
    kv = torch.randn(rows * width + 1, 2, kv_heads, BLOCK_SIZE, dim, device=device).bfloat16()
    order = torch.randperm(rows * width, dtype=torch.int32).view(rows, width) + 1
    plan = Rows(
        order.to(device),
        torch.arange(rows + 1, dtype=torch.int32, device=device),
        torch.full((rows,), keys, dtype=torch.int32, device=device),
        torch.zeros(0, 2, dtype=torch.int32, device=device),
        rows,
        keys,
    )
    q = torch.randn(rows, heads, dim, device=device).bfloat16()
    seconds = seconds_of(device, lambda: paged_attention(q, kv, plan, dim**-0.5))
    share = 2 * rows * keys * kv_heads * dim * 2 / seconds / copy
    part.note(decode_attention_of_copy=share)


def requests(part: MeasuredPart, count: int, seed: int) -> list[Request]:
    """Prompts of random ids, and answers of known lengths."""
    rng = np.random.default_rng(seed)
    least, most = (5, 7) if part.fake else (SHORTEST, LONGEST)
    vocab = FAKE_QWEN3["vocab_size"] if part.fake else QWEN3_0_6B["vocab_size"]
    return [
        Request(
            f"{seed}-{n}",
            tuple(map(int, rng.integers(0, vocab, rng.integers(least, most + 1)))),
            SamplingParams(
                temperature=TEMPERATURE,
                ignore_eos=True,
                max_tokens=int(rng.integers(least, most + 1)),
            ),
            seed=n,
        )
        for n in range(count)
    ]


def serve(part: MeasuredPart, copy: float, rate: float) -> None:
    """Run 256 requests with the shape of Qwen3-0.6B, all at once."""
    count = (2 if part.smallest else 4) if part.fake else ROWS
    wave = requests(part, count, 1)
    stream = None if part.fake else torch.cuda.current_stream()
    config = FAKE_QWEN3 if part.fake else QWEN3_0_6B
    decoder = random_decoder(config, part.device, stream=stream)
    metered = MeteredDecoder(decoder)
    steps = metered.steps
    served = ServedEngine(
        decoder,
        part.device,
        [len(one.prompt_ids) + (one.params.max_tokens or 0) for one in wave],
        recorder=TimedRecorder(part.device, steps),
        sampling=TimedSampling(stream, part.device, steps),
        chunk_size=64 if part.fake else CHUNK,
        step_tokens=0 if part.fake else STEP_TOKENS,
        model=metered,
    )
    if not part.fake:
        served.run(requests(part, 64, 0), part.left_s)  # compiles
        steps.clear()
    seconds = served.run(wave, part.left_s)
    wait(part.device)
    served.close()
    ideal = sum(max(step.bytes / copy, step.operations / rate) for step in steps)
    tokens = sum(one.params.max_tokens or 0 for one in wave)
    part.note(
        requests=count,
        prompt_tokens=sum(len(one.prompt_ids) for one in wave),
        answer_tokens=served.num_tokens,
        answer_tokens_requested=tokens,
        seconds=seconds,
        tokens_s=tokens / seconds,
        steps=len(steps),
        roofline_s=ideal,
        of_roofline=ideal / seconds,
    )
    part.note(**idle(steps, count))


def idle(steps: list[StepRecord], rows: int) -> dict[str, Any]:
    """Idle times of the recorded steps that follow another one with at least nine tenths of the
    rows."""
    gaps = spans = 0.0
    num = 0
    for before, step in pairwise(steps):
        if min(before.rows, step.rows) >= 0.9 * rows and before.end and step.start and step.end:
            gaps += max(0.0, before.end.elapsed_time(step.start))
            spans += before.end.elapsed_time(step.end)
            num += 1
    return {"idle_of_steps": gaps / spans if spans else None, "idle_steps": num}


def single_steps(part: MeasuredPart, copy: float, rate: float) -> None:
    """Llama-8B's shape: decode steps of 1 and 64 rows, a prefill, and Q4_K."""
    hf_config = FAKE_LLAMA if part.fake else LLAMA_8B
    prefill, batches = (20, (1, 2)) if part.fake else (PREFILL, (1, 64))
    alone: dict[str, float] = {}
    for format in ("BF16", "Q4_K"):
        decoder = random_decoder(hf_config, part.device, format)
        rows = batches if format == "BF16" else batches[:1]
        keys = 16 if part.fake else 512
        width = max(rows[-1] * blocks_for(keys, BLOCK_SIZE), blocks_for(prefill, BLOCK_SIZE))
        kv = make_pool(part.device, decoder.kv_groups, width)
        vocab = decoder.config.vocab_size
        decoder.record(make_recorder(part.device), kv, rows[-1])
        some = Sequences(decoder, kv, drawn_tokens(rows[-1], keys, vocab))
        for count in rows:
            step = [Row(n, keys - 1, keys) for n in range(count)]
            seconds = seconds_of(part.device, lambda s=some, step=step: s.logits(step))
            read = step_bytes(decoder, format) + count * keys * token_bytes(decoder)
            share = read / copy / seconds
            part.note(**{f"{format}_{count}_ms": 1000 * seconds})
            part.note(**{f"{format}_{count}_of_roofline": share})
            if count == 1:
                alone[format] = seconds
        if format == "BF16":
            whole = Sequences(decoder, kv, drawn_tokens(1, prefill, vocab))
            long_prefill(part, whole, prefill, rate)
            del whole
        del decoder, kv, some
        if not part.fake:
            torch.cuda.empty_cache()
    part.note(q4_k_of_bf16=alone["BF16"] / alone["Q4_K"])


def long_prefill(part: MeasuredPart, whole: Sequences, length: int, rate: float) -> None:
    """Prefill one long chunk."""
    config = whole.decoder.config
    seconds = seconds_of(part.device, lambda: whole.logits([Row(0, 0, length)]), 3, 1)
    values = step_bytes(whole.decoder) // 2 - config.vocab_size * config.hidden_size
    pairs = 4 * config.num_layers * config.num_heads * config.head_dim * length * (length + 1) // 2
    share = (2 * values * length + pairs) / seconds / rate
    part.note(prefill_tokens=length, prefill_ms=1000 * seconds, prefill_of_mm=share)


if __name__ == "__main__":
    run(measure)
