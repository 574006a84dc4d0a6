"""The native CPU backend: C++ kernels that need no torch; weights are packed once, at load."""

import logging
from collections.abc import Callable, Sequence

from pdserve.engine.api import ConfigError, EngineConfig
from pdserve.engine.backends import Backend
from pdserve.engine.execution import HOST_SHARE, free_host_bytes
from pdserve.engine.kv import KvSpec
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models import ModelConfig, NativeDecoder, int8_warning
from pdserve.engine.weights import RawTensor
from pdserve.engine.weights.convert import unpack
from pdserve.kernels.cpu import KV_BLOCK, CpuKernels, CpuSampling

log = logging.getLogger(__name__)

EXPANDED = {"float32": "F32", "bf16": "BF16"}


class NativeBackend(Backend):
    """Backend with the native C++ kernels for CPUs; docs/cpu.md describes it."""

    name = "native"
    kv_dtypes = (*Backend.kv_dtypes, "int8")
    copies_weights = True  # packs them
    default_kv_dtype = "float16"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        try:
            self._kernels = CpuKernels(config.threads, config.native_isa)
        except ValueError as error:
            raise ConfigError(f"--native-isa: {error}") from None
        self.sampling = CpuSampling(self._kernels.context)

    @classmethod
    def obstacle(cls, config: EngineConfig) -> str:
        if config.device != "cpu":
            return f"--device {config.device}"
        if config.block_size % KV_BLOCK:
            return f"--block-size {config.block_size}, which is not a multiple of {KV_BLOCK}"
        return ""

    @property
    def weights_format(self) -> str | None:
        return EXPANDED.get(self._config.weights)

    def decoder(self, model: ModelConfig, weights: Callable[[str], RawTensor]) -> NativeDecoder:
        kv_dtype = self.kv_dtype(model)
        decoder = NativeDecoder(model, weights, self._kernels, kv_dtype)
        if kv_dtype == "int8":
            warning = int8_warning(model, lambda name: unpack(weights(name)))
            if warning:
                log.warning("--kv-dtype int8: %s", warning)
        return decoder

    def kv_cache(self, spec: KvSpec, num_blocks: Sequence[int]) -> KvCache:
        return KvCache(spec, num_blocks)

    def memory_bytes(self) -> int:
        return int(free_host_bytes() * HOST_SHARE)


BACKEND = NativeBackend
