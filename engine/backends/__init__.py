"""What computes a model: a backend is chosen once, at load.

Each is one module here that has the name of its --kernels value and a Backend named BACKEND; a
module elsewhere calls `register`. A module is imported only when its backend is chosen.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import ClassVar, Protocol

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.execution.runner import Model
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.spec import KvSpec, LayerGroup
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.weights.format import RawTensor
from pdserve.kernels.streams import SamplingOps

EXTRAS = {"torch": "torch", "triton": "torch,cuda"}  # module -> the extras that install it
PREFERRED = {"cpu": "native", "cuda": "cuda"}  # by device, what --kernels auto takes
FALLBACK = "reference"  # if an option rules that out
KV_DTYPES = {"bf16": "bfloat16"}  # option -> name; the others are called the same


class ModelDecoder(Model, Protocol):
    """A model with its weights."""

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
    kv_dtypes: ClassVar[Collection[str]] = ("float32", "bf16", "float16")  # of --kv-dtype
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
    def decoder(self, model: ModelConfig, weights: Callable[[str], RawTensor]) -> ModelDecoder:
        """The decoder of a model; `weights` is asked once for each of its tensors."""

    @abstractmethod
    def kv_cache(self, spec: KvSpec, num_blocks: Sequence[int]) -> KvCache:
        """Pools for that decoder, with so many blocks for each group of `spec`."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """How much memory the pools of all engines of this machine may take."""

    def prepare(self, decoder: ModelDecoder, kv: KvCache) -> None:  # noqa: B027  (not all need it)
        """What takes time and has to be done before the first step over the engine's pool."""

    def pool_bytes(self) -> int:
        """How much memory the pool of this engine may take."""
        return self.memory_bytes() // self._config.host_engines


_added: dict[str, type[Backend]] = {}


def register(backend: type[Backend]) -> None:
    """Make a backend known. Raises ValueError if its name is taken."""
    if backend.name in names():
        raise ValueError(f"backend {backend.name} is registered twice")
    _added[backend.name] = backend


def names() -> Collection[str]:
    """Of all backends; none is imported for it."""
    return {*_added, *(module.name for module in pkgutil.iter_modules(__path__))}


def choose(config: EngineConfig) -> type[Backend]:
    """The backend for these options. Raises ValueError for one that does not exist or needs what is
    not installed, and for options that contradict each other."""
    name, reason = config.kernels, f"--kernels {config.kernels}"
    if name == "auto":
        preferred = PREFERRED[config.device]
        # float32 weights are asked for when exactness against other implementations matters.
        exact = config.weights == "float32"
        reason = f"--device {config.device}"
        obstacle = "--weights float32" if exact else _find(preferred, reason).obstacle(config)
        name, reason = (FALLBACK, obstacle) if obstacle else (preferred, reason)
    backend = _find(name, reason)
    if config.kv_dtype not in ("auto", *backend.kv_dtypes):
        raise ValueError(
            f"--kv-dtype {config.kv_dtype} needs the native kernels, which {reason} excludes"
        )
    if obstacle := backend.obstacle(config):
        raise ValueError(f"--kernels {name} contradicts {obstacle}")
    return backend


def _find(name: str, reason: str) -> type[Backend]:
    """`reason`: the option that led to it."""
    if name in _added:
        return _added[name]
    if name not in names():
        known = ", ".join(("auto", *sorted(names())))
        raise ValueError(f"--kernels {name} is not known; known: {known}")
    try:
        found: type[Backend] = import_module(f"{__name__}.{name}").BACKEND
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise ValueError(
            f"{reason} needs the {name} backend, and it computes with {error.name}, which is not "
            f"installed: pip install 'pdserve[{EXTRAS[error.name]}]'"
        ) from None
    return found
