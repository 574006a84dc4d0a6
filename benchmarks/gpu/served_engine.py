"""An engine on its thread, as in a worker, that runs waves of requests."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from sequences import BLOCK_SIZE, make_pool

from pdserve.engine.api import Finished, NewTokens, Request, RequestFailed, Step
from pdserve.engine.engine import Engine
from pdserve.engine.kv import blocks_for
from pdserve.engine.models.cuda import CudaDecoder
from pdserve.engine.models.cuda.decoder import Recorder
from pdserve.engine.scheduling import EngineLimits
from pdserve.engine.thread import EngineThread
from pdserve.kernels.cuda.sampling import CudaSampling


class ServedEngine:
    """An engine without a prefix cache, whose pool holds all requests of a wave at once."""

    def __init__(
        self,
        decoder: CudaDecoder,
        device: str,
        lens: Sequence[int],
        *,
        recorder: Recorder,
        sampling: CudaSampling,
        chunk_size: int,
        step_tokens: int,
        model: Any = None,
    ) -> None:
        """`lens`: numbers of tokens of the requests of the largest wave, prompt and answer.
        `model`: used instead of `decoder` in the engine, e.g. a wrapper that measures steps."""
        num_blocks = sum(blocks_for(num_tokens + 1, BLOCK_SIZE) + 1 for num_tokens in lens)
        kv = make_pool(device, decoder.kv_groups, num_blocks)
        decoder.record(recorder, kv, len(lens))
        limits = EngineLimits(
            vocab_size=decoder.config.vocab_size,
            context_len=decoder.config.context_len,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_running=len(lens),
            chunk_size=chunk_size,
            step_tokens=step_tokens,
        )
        engine = Engine(model or decoder, kv, limits, sampling, prefix_cache=False)
        self._thread = EngineThread(engine, self._on_step)
        self._num_open = 0
        self._failures: list[str] = []
        self._ended = threading.Event()
        self.num_tokens = 0  # generated in the last wave
        self._thread.start()

    def _on_step(self, step: Step) -> None:
        for event in step.events:
            self._num_open -= isinstance(event, Finished | RequestFailed)
            if isinstance(event, NewTokens):
                self.num_tokens += len(event.ids)
            if isinstance(event, RequestFailed):
                self._failures.append(event.message)
        if not self._num_open:
            self._ended.set()

    def run(self, wave: Sequence[Request], limit_s: float | None = None) -> float:
        """Return the seconds until all requests have ended. Raises RuntimeError if one fails, or if
        they take longer than `limit_s`."""
        self._num_open, self.num_tokens, self._ended = len(wave), 0, threading.Event()
        started = time.perf_counter()
        self._thread.post(lambda engine: [engine.submit(one) for one in wave]).result()
        if not self._ended.wait(limit_s) or self._failures:
            raise RuntimeError(f"{self._num_open} requests have not ended; {self._failures[:3]}")
        return time.perf_counter() - started

    def close(self) -> None:
        self._thread.close()
