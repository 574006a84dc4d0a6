"""The reference backend, in torch on a CPU or a CUDA device: tests compare faster backends with
it."""

from collections.abc import Callable, Sequence

import torch

from pdserve.engine.api import EngineConfig
from pdserve.engine.backends import Backend
from pdserve.engine.execution import HOST_SHARE, free_host_bytes, keep_freed_memory
from pdserve.engine.kv import KvSpec
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.torch_cache import DeviceKvCache, TorchKvCache
from pdserve.engine.models import ModelConfig
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.torch_parts import PLAIN_FORMATS
from pdserve.engine.weights import RawTensor
from pdserve.kernels import reference

KERNELS = "reference-3"  # increment when results change
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
CUDA_SHARE = 0.85  # of free memory; the rest is for activations and others


class ReferenceBackend(Backend):
    """Backend that computes in one dtype with torch. Weights that are kept in their stored format
    are expanded to that dtype at each use."""

    name = "reference"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.threads:
            torch.set_num_threads(config.threads)
        keep_freed_memory()
        self._device = torch.device(config.device)
        default = "float32" if config.device == "cpu" else "bf16"
        self._dtype = DTYPES[config.weights if config.weights in DTYPES else default]
        self.sampling = reference

    @property
    def weights_format(self) -> str | None:
        return None if self._config.weights == "quantized" else PLAIN_FORMATS[self._dtype]

    @property
    def default_kv_dtype(self) -> str:
        return _name(self._dtype)

    def decoder(self, model: ModelConfig, weights: Callable[[str], RawTensor]) -> Decoder:
        numerics = reference_numerics(self._device, self._dtype)
        return Decoder(model, weights, self._dtype, self.kv_dtype(model), self._device, numerics)

    def kv_cache(self, spec: KvSpec, num_blocks: Sequence[int]) -> KvCache:
        kind = TorchKvCache if self._device.type == "cpu" else DeviceKvCache
        return kind(spec, num_blocks)

    def memory_bytes(self) -> int:
        if self._device.type == "cpu":
            return int(free_host_bytes() * HOST_SHARE)
        return int(torch.cuda.mem_get_info()[0] * CUDA_SHARE)


def reference_numerics(device: torch.device, dtype: torch.dtype) -> str:
    """Return the numerics id of this backend: kernels' version, torch version, CPU instruction set
    or GPU, and dtype, which determine the bits of its results."""
    isa = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    torch_version = torch.__version__.split("+")[0]
    return f"{KERNELS}+torch-{torch_version}/{device.type}/{isa.replace(' ', '-')}/{_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BACKEND = ReferenceBackend
