"""The CUDA backend: Triton kernels, weights packed on the device, and results that do not depend on
what else is in the batch."""

from collections.abc import Callable, Sequence

import torch
import triton

from pdserve.engine.api import ConfigError, EngineConfig
from pdserve.engine.backends import Backend, ModelDecoder
from pdserve.engine.kv import KvSpec
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.torch_cache import DeviceKvCache
from pdserve.engine.models import ModelConfig
from pdserve.engine.models.cuda import CudaDecoder, CudaRecorder, row_counts
from pdserve.engine.transport import DEVICE_SLOT_BYTES, SLOTS
from pdserve.engine.weights import RawTensor
from pdserve.kernels.cuda.attention import LATENT_SPLIT, SPLIT
from pdserve.kernels.cuda.sampling import CudaSampling

KERNELS = "cuda-2"  # increment when results change
MIN_CAPABILITY = (8, 0)  # for bfloat16 products
CUDA_SHARE = 0.9  # of free memory; the rest is for fragmentation and others
WINDOWS_BYTES = 2 * SLOTS * DEVICE_SLOT_BYTES  # for two prefill workers that send at once


class CudaBackend(Backend):
    """Backend that computes in bfloat16 on a CUDA device with Triton kernels."""

    name = "cuda"
    copies_weights = True
    default_kv_dtype = "bfloat16"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._steps_bytes = 0  # set with the model
        self._capability = torch.cuda.get_device_capability(self._device)
        if self._capability < MIN_CAPABILITY:
            major, minor = self._capability
            raise ConfigError(
                f"--kernels cuda needs compute capability 8.0, but this GPU has {major}.{minor}; "
                "use --kernels reference"
            )
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.sampling = CudaSampling(self._stream)

    @classmethod
    def obstacle(cls, config: EngineConfig) -> str:
        if config.device != "cuda":
            return f"--device {config.device}"
        if config.weights == "float32":
            return "--weights float32"
        if config.block_size % 16:
            return f"--block-size {config.block_size}, which is not a multiple of 16"
        return ""

    @property
    def weights_format(self) -> str | None:
        return "BF16" if self._config.weights == "bf16" else None

    def decoder(self, model: ModelConfig, weights: Callable[[str], RawTensor]) -> CudaDecoder:
        numerics = cuda_numerics(self._capability, torch.bfloat16)
        self._steps_bytes = steps_bytes(model, row_counts(self._config.max_running)[-1])
        kv_dtype = self.kv_dtype(model)
        return CudaDecoder(
            model, weights, torch.bfloat16, kv_dtype, self._device, numerics, self._stream
        )

    def kv_cache(self, spec: KvSpec, num_blocks: Sequence[int]) -> KvCache:
        return DeviceKvCache(spec, num_blocks, self._stream)

    def prepare(self, decoder: ModelDecoder, kv: KvCache) -> None:
        """Record the CUDA graphs of decode steps, unless --enforce-eager is set."""
        assert isinstance(decoder, CudaDecoder)
        if not self._config.enforce_eager:
            decoder.record(CudaRecorder(self._stream), kv, self._config.max_running)

    def memory_bytes(self) -> int:
        """Return CUDA_SHARE of the device's free memory. The prefill chunk must have been measured
        before, because torch keeps the memory that chunks need, and so it no longer counts as
        free."""
        return int(torch.cuda.mem_get_info(self._device)[0] * CUDA_SHARE)

    def pool_bytes(self) -> int:
        return max(0, super().pool_bytes() - WINDOWS_BYTES - self._steps_bytes)


def steps_bytes(model: ModelConfig, rows: int) -> int:
    """Estimate how many bytes of device memory the model's steps of `rows` rows need.

    Counts the partial results of attention and the widest activations with their inputs, for the
    largest step recorded as a CUDA graph, whose memory smaller recorded steps share; and the
    partial results a second time, for a step that is not recorded.
    """
    splits = -(-model.context_len // (LATENT_SPLIT if model.latent else SPLIT))
    partials = 4 * model.num_heads * splits * (model.head_dim + 2)
    widest = max(2 * model.ffn_size, 3 * model.num_heads * model.head_dim, model.hidden_size)
    return rows * (2 * partials + 4 * widest * torch.bfloat16.itemsize)


def cuda_numerics(capability: tuple[int, int], dtype: torch.dtype) -> str:
    """Return the numerics id of this backend: the kernels' version, compiler, GPU capability and
    dtype, which determine the bits of its results."""
    major, minor = capability
    name = str(dtype).removeprefix("torch.")
    return f"{KERNELS}+triton-{triton.__version__}/sm_{major}{minor}/{name}"


BACKEND = CudaBackend
