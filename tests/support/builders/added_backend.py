"""A backend without a model, added from outside the product: the next token is the previous one
plus one. Importing this file registers it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdserve.engine.backends import Backend, register
from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import KvSpec
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.weights import RawTensor
from pdserve.kernels.cpu import CpuKernels, CpuSampling


class CountingDecoder:
    numerics = "counting-1"

    def __init__(self, config: Any, kv_dtype: str) -> None:
        self.config = config
        self.kv_groups = config.kv_groups(kv_dtype)

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        return batch.token_ids[batch.logit_tokens][:, None].astype(np.float32)

    def logits(self, hidden: Any) -> Any:
        found = np.zeros((len(hidden), self.config.vocab_size), np.float32)
        found[np.arange(len(hidden)), hidden[:, 0].astype(int) + 1] = 9.0
        return found

    def states(self, hidden: Any) -> Any:
        return hidden


class CountingBackend(Backend):
    name = "counting"
    weights_format = None
    default_kv_dtype = "float16"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sampling = CpuSampling(CpuKernels(threads=1).context)

    def decoder(self, model: Any, weights: Callable[[str], RawTensor]) -> CountingDecoder:
        from pdserve.engine.models import tensor_shapes

        for name in tensor_shapes(model):  # which requests every tensor
            weights(name)
        return CountingDecoder(model, self.kv_dtype(model))

    def kv_cache(self, spec: KvSpec, num_blocks: Sequence[int]) -> KvCache:
        return KvCache(spec, num_blocks)

    def memory_bytes(self) -> int:
        return 1 << 20


register(CountingBackend)
