"""A backend makes whatever depends on how a model is computed; it is chosen once, at load.

Each is one module of engine/backends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.execution.runner import Model
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.spec import KvSpec, LayerGroup
from pdserve.engine.weights.format import RawTensor
from pdserve.kernels.streams import SamplingOps

KV_DTYPES = {"bf16": "bfloat16"}  # option -> name; the others are called the same


class ModelDecoder(Model, Protocol):
    """A model with its weights."""

    @property
    def config(self) -> Any:
        """engine/models/config.py ModelConfig."""

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """What it keeps of each layer."""

    @property
    def numerics(self) -> str:
        """Names what computes it: within one, the same inputs give the same floats as far as the
        backend promises it."""


class Backend(ABC):
    """Makes the decoder, the KV pool and the sampling of one engine."""

    name: ClassVar[str]  # as --kernels has it
    copies_weights: ClassVar[bool] = False  # so that a loaded file's pages need not stay
    sampling: SamplingOps  # picks tokens from the decoder's logits

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError for options that it cannot follow."""
        self._config = config

    @classmethod
    def obstacle(cls, config: EngineConfig) -> str:
        """The option that rules it out, in words; empty if none does."""
        return ""

    @property
    @abstractmethod
    def weights_format(self) -> str | None:
        """The plain numbers to which matrices are expanded at load; None: they stay as stored."""

    @property
    @abstractmethod
    def default_kv_dtype(self) -> str:
        """The dtype of keys and values, unless an option says otherwise."""

    @property
    def kv_dtype(self) -> str:
        asked = self._config.kv_dtype
        return self.default_kv_dtype if asked == "auto" else KV_DTYPES.get(asked, asked)

    @abstractmethod
    def decoder(self, model: Any, weights: Callable[[str], RawTensor]) -> ModelDecoder:
        """The decoder of a ModelConfig; `weights` is asked once for each of its tensors."""

    @abstractmethod
    def kv_cache(self, spec: KvSpec, num_blocks: int) -> KvCache:
        """A pool for that decoder."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """How much memory the pools of all engines of this machine may take."""

    def pool_bytes(self) -> int:
        """How much memory the pool of this engine may take."""
        return self.memory_bytes() // self._config.host_engines
