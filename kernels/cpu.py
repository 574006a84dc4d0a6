"""The Python interface to the native CPU kernels (kernels/native, docs/cpu.md).

A token's result never depends on other tokens of the batch, on chunk borders or on the number of
threads; for the same `numerics` it is bit-identical.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.kernels import _native
from pdserve.kernels._native import Context, NativeSampler, Stream
from pdserve.kernels.sampling_ops import Mask, StreamSettings, TokenScores

VERSION = "native-4"  # increment with any change of a kernel's results
FORMATS = frozenset(_native.formats())  # supported by pack
GROUPED = frozenset(_native.grouped_formats())  # supported by pack_groups
SCALES = {"float16": "F16", "uint16": "BF16", "float32": "F32", "uint8": "E4M3"}
KV_BLOCK = 16  # the tokens of a KV block must be a multiple of this


class CpuKernels:
    """The native CPU kernels for one instruction set, by default the best one of this machine, and
    their thread pool."""

    def __init__(self, threads: int = 0, isa: str = "") -> None:
        """Start the threads; `threads` 0 means default_threads(). Helper threads are pinned if the
        process may use exactly that many cores. `isa` is one of `_native.isas()`; raises ValueError
        for another."""
        threads = threads or default_threads()
        cores = sorted(os.sched_getaffinity(0))
        self.context = _native.Context(threads, cores if len(cores) == threads else [], isa)
        self.numerics = f"{VERSION}/cpu/{self.context.isa}"

    def pack(self, data: NDArray[Any], format: str, rows: int, cols: int) -> "_native.Matrix":
        """Pack stored weights [rows, cols] into the kernels' layout.

        `data` holds uint8 blocks [rows, bytes] of a GGUF type, or F16, BF16 (as uint16) or F32
        numbers [rows, cols]; it is not needed afterwards. Raises ValueError for another `format`.
        """
        return _native.Matrix.pack(self.context, format, _bytes(data), rows, cols)

    def pack_groups(
        self,
        format: str,
        codes: NDArray[np.uint8],
        scales: NDArray[Any],
        zeros: NDArray[np.uint8] | None = None,
        divisors: NDArray[np.float32] | None = None,
    ) -> "_native.Matrix":
        """Pack weights with one scale per group of columns into the kernels' layout.

        `format` is one of GROUPED; `codes`, `zeros` and `divisors` are those of
        `_native.Matrix.pack_groups`; `scales` [rows, groups] holds float32, float16, bfloat16 (as
        uint16) or 8-bit floats (as uint8). Raises ValueError like `_native.Matrix.pack_groups`.
        """
        zeros = None if zeros is None else np.ascontiguousarray(zeros)
        divisors = None if divisors is None else np.ascontiguousarray(divisors)
        kind = SCALES.get(scales.dtype.name, scales.dtype.name)
        codes = np.ascontiguousarray(codes)
        return _native.Matrix.pack_groups(
            self.context, format, codes, kind, _bytes(scales), zeros, divisors
        )


def _bytes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array [rows, ...] as uint8 [rows, bytes]."""
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1)


def default_threads() -> int:
    """Return the default number of threads: OMP_NUM_THREADS if set, else the number of cores that
    this process may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdecimal() and int(setting) else len(os.sched_getaffinity(0))


class CpuSampling:
    """Sampling on the CPU; implements SamplingOps with the threads of a native context. Not
    thread-safe: make one call at a time."""

    def __init__(self, context: Context) -> None:
        self._sampler = NativeSampler(context)

    def stream(self, settings: StreamSettings, vocab: int) -> Stream:
        """Create the sampling state of a token stream. Raises ValueError for token ids outside the
        vocabulary."""
        return Stream(
            vocab,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=settings.seed,
            choice=settings.choice,
            repetition_penalty=settings.repetition_penalty,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            logit_bias=dict(settings.logit_bias),
            masked_ids=settings.masked_ids,
            min_tokens=settings.min_tokens,
            penalty_window=settings.penalty_window,
            prompt_ids=settings.penalized_prompt,
        )

    def sample(
        self,
        logits: Any,
        rows: list[int],
        streams: list[Stream],
        generated: list[list[int]],
        masks: list[Mask | None] | None = None,
    ) -> list[int]:
        """Sample the next token of each stream like kernels/reference/sampling.py, with one native
        call for the whole step."""
        return self._sampler.sample(logits, rows, streams, generated, masks)

    def logprobs(
        self, logits: Any, tokens: list[int], count: int, also: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Return log-probabilities like kernels/reference/sampling.py, with sums in doubles."""
        return self._sampler.logprobs(logits, tokens, count, also)
