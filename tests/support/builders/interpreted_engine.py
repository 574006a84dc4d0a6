"""An engine over the CUDA kernels without a GPU: interpreted, in host memory, with graphs that
replay recorded launches.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from fakes import triton_interpreter as _  # noqa: F401  (before kernels run)
from fakes.late_device import AheadEngine
from torch import Tensor

from builders.paged_runner import load_decoder
from pdserve.engine.engine import Engine
from pdserve.engine.kv import KvSpec, pool_sizes
from pdserve.engine.kv.torch_cache import TorchKvCache
from pdserve.engine.models.cuda import CudaDecoder
from pdserve.engine.scheduling import EngineLimits
from pdserve.kernels.cuda.sampling import CudaSampling


class ReplayRecorder:
    """Launches again with the recorded tensors, and returns the same tensor each time."""

    def __init__(self) -> None:
        self.replayed: list[int] = []  # rows of each graph that ran

    def record(self, launch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = launch().clone()

        def replay() -> Tensor:
            self.replayed.append(len(result))
            return result.copy_(launch())

        return replay


def interpreted_engine(
    path: Path, *, ahead: bool, recorder: ReplayRecorder | None = None, num_blocks: int = 16
) -> Engine:
    """Return an engine in bfloat16, of four rows at most."""
    decoder = load_decoder(path, torch.bfloat16, kernels="cuda")
    assert isinstance(decoder, CudaDecoder)
    spec = KvSpec(16, decoder.kv_groups)
    limits = EngineLimits(
        vocab_size=decoder.config.vocab_size,
        context_len=min(decoder.config.context_len, num_blocks * 16),
        block_size=16,
        num_blocks=num_blocks,
        max_running=4,
        chunk_size=16,
    )
    kv = TorchKvCache(spec, pool_sizes(spec, num_blocks, 4, 16))
    if recorder is not None:
        decoder.record(recorder, kv, 4)
    return (AheadEngine if ahead else Engine)(decoder, kv, limits, CudaSampling())
