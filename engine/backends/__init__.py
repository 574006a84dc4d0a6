"""Backends that compute a model; one is chosen at load.

Each backend is a module here, named like its --kernels value, that defines a Backend named BACKEND;
a module elsewhere calls `register`. A module is imported only when its backend is chosen.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import ClassVar, Protocol

from pdserve.engine.api import EngineConfig
from pdserve.engine.execution import Model
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models import ModelConfig
from pdserve.engine.weights import RawTensor
from pdserve.kernels.sampling_ops import SamplingOps

EXTRAS = {"torch": "torch", "triton": "torch,cuda"}  # module -> the extras that install it
PREFERRED = {"cpu": "native", "cuda": "cuda"}  # by device, the choice of --kernels auto
FALLBACK = "reference"  # if an option rules out the preferred backend
KV_DTYPES = {"bf16": "bfloat16"}  # option -> name; other names equal the option


class ModelDecoder(Model, Protocol):
    """A model with its weights."""

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Layout of the KV of its layers."""

    @property
    def numerics(self) -> str:
        """Numerics id: equal ids and inputs give equal floats, as far as the backend promises."""


class Backend(ABC):
    """Makes one engine's decoder, KV pool and sampling."""

    name: ClassVar[str]  # value of --kernels
    kv_dtypes: ClassVar[Collection[str]] = ("float32", "bf16", "float16")  # accepted by --kv-dtype
    copies_weights: ClassVar[bool] = False  # if so, a loaded file's pages need not stay
    sampling: SamplingOps  # samples tokens from the decoder's logits

    def __init__(self, config: EngineConfig) -> None:
        """Raise ValueError for options that the backend cannot follow."""
        self._config = config

    @classmethod
    def obstacle(cls, config: EngineConfig) -> str:
        """Return the option that rules the backend out, as text; empty if none does."""
        return ""

    @property
    @abstractmethod
    def weights_format(self) -> str | None:
        """Plain format to which matrices are expanded at load; None keeps them as stored."""

    @property
    @abstractmethod
    def default_kv_dtype(self) -> str:
        """Default dtype of keys and values."""

    @property
    def kv_dtype(self) -> str:
        requested = self._config.kv_dtype
        return self.default_kv_dtype if requested == "auto" else KV_DTYPES.get(requested, requested)

    @abstractmethod
    def decoder(self, model: ModelConfig, weights: Callable[[str], RawTensor]) -> ModelDecoder:
        """Build the decoder of a model; it calls `weights` once for each tensor."""

    @abstractmethod
    def kv_cache(self, spec: KvSpec, num_blocks: Sequence[int]) -> KvCache:
        """Build pools for that decoder, with `num_blocks[g]` blocks for group g of `spec`."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Return the bytes that the pools of all engines on this machine may take."""

    def prepare(self, decoder: ModelDecoder, kv: KvCache) -> None:  # noqa: B027  (not all need it)
        """Do slow work that must precede the first step over the engine's pool."""

    def pool_bytes(self) -> int:
        """Return the bytes that the pool of this engine may take."""
        return self.memory_bytes() // self._config.host_engines


_added: dict[str, type[Backend]] = {}


def register(backend: type[Backend]) -> None:
    """Make a backend known. Raises ValueError if its name is taken."""
    if backend.name in names():
        raise ValueError(f"backend {backend.name} is registered twice")
    _added[backend.name] = backend


def names() -> Collection[str]:
    """Return the names of all backends, without importing them."""
    return {*_added, *(module.name for module in pkgutil.iter_modules(__path__))}


def choose(config: EngineConfig) -> type[Backend]:
    """Return the backend for these options. Raises ValueError if it does not exist or needs a
    package that is not installed, and for options that contradict each other."""
    name, reason = config.kernels, f"--kernels {config.kernels}"
    if name == "auto":
        preferred = PREFERRED[config.device]
        # --weights float32 is for exactness against other implementations.
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
    """Return a backend by name; `reason`: the option that selected it, for the error text."""
    if name in _added:
        return _added[name]
    if name not in names():
        supported = ", ".join(("auto", *sorted(names())))
        raise ValueError(f"--kernels {name} is not supported; supported: {supported}")
    try:
        backend: type[Backend] = import_module(f"{__name__}.{name}").BACKEND
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise ValueError(
            f"{reason} selects the {name} backend, but its dependency {error.name} is not "
            f"installed; run: pip install 'pdserve[{EXTRAS[error.name]}]'"
        ) from None
    return backend
