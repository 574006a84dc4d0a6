"""Backends, which compute a model; one is chosen when the model is loaded.

Each module of this folder is one backend: it is named like its value of --kernels and defines a
Backend class as BACKEND. A backend elsewhere is added by `register`. A module is imported only when
its backend is chosen.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import ClassVar, Protocol

from pdserve.engine.api import ConfigError, EngineConfig
from pdserve.engine.execution import Model
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models import ModelConfig
from pdserve.engine.weights import RawTensor
from pdserve.kernels.sampling_ops import SamplingOps

EXTRAS = {"reference": "torch", "cuda": "torch,cuda"}  # backend -> the extras that it needs
PREFERRED = {"cpu": "native", "cuda": "cuda"}  # by device, the choice of --kernels auto
FALLBACK = "reference"  # if an option rules out the preferred backend
KV_DTYPES = {"bf16": "bfloat16"}  # option -> name; other names equal the option


class ModelDecoder(Model, Protocol):
    """A model with its weights, built by a backend."""

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups of the model, with the layout of their keys and values."""

    @property
    def numerics(self) -> str:
        """Id of the numerics: decoders with equal ids compute equal floats from equal inputs, as
        far as the backend promises."""


class Backend(ABC):
    """Factory of an engine's decoder, KV pool and sampling operations for one set of kernels."""

    name: ClassVar[str]  # value of --kernels
    kv_dtypes: ClassVar[Collection[str]] = ("float32", "bf16", "float16")  # accepted by --kv-dtype
    copies_weights: ClassVar[bool] = False  # if so, a loaded file's pages need not stay
    sampling: SamplingOps  # samples tokens from the decoder's logits

    def __init__(self, config: EngineConfig) -> None:
        """Make the backend for these options. Raises ConfigError if it does not support one of
        them."""
        self._config = config

    @classmethod
    def obstacle(cls, config: EngineConfig) -> str:
        """Return the option because of which this backend cannot be used, as text for messages;
        empty if it can."""
        return ""

    @property
    @abstractmethod
    def weights_format(self) -> str | None:
        """Format, "F32" or "BF16", to which weight matrices are expanded at load; None keeps them
        in the format in which they are stored."""

    @property
    @abstractmethod
    def default_kv_dtype(self) -> str:
        """Data type of a decoder's keys and values if --kv-dtype is "auto"."""

    def kv_dtype(self, model: ModelConfig) -> str:
        """Return the data type of the model's keys and values. An encoder keeps them for one step
        only, so that a smaller type saves nothing."""
        requested = self._config.kv_dtype
        if requested != "auto":
            return KV_DTYPES.get(requested, requested)
        return "float32" if model.encoder else self.default_kv_dtype

    @abstractmethod
    def decoder(self, model: ModelConfig, weights: Callable[[str], RawTensor]) -> ModelDecoder:
        """Build the decoder of a model. `weights` returns a tensor by name and is called once for
        each tensor."""

    @abstractmethod
    def kv_cache(self, spec: KvSpec, num_blocks: Sequence[int]) -> KvCache:
        """Build the KV pool of a decoder, with `num_blocks[g]` blocks for layer group g of
        `spec`."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Return how many bytes the KV pools of all engines on this machine may take together."""

    def prepare(self, decoder: ModelDecoder, kv: KvCache) -> None:  # noqa: B027  (not all need it)
        """Do slow work that needs the KV pool and must be done before the first step. Does nothing
        by default."""

    def pool_bytes(self) -> int:
        """Return how many bytes the KV pool of this engine may take."""
        return self.memory_bytes() // self._config.host_engines


_added: dict[str, type[Backend]] = {}


def register(backend: type[Backend]) -> None:
    """Add a backend defined outside this folder. Raises ValueError if another backend has its
    name."""
    if backend.name in names():
        raise ValueError(f"backend {backend.name} is registered twice")
    _added[backend.name] = backend


def names() -> Collection[str]:
    """Return the names of all backends; imports none of them."""
    return {*_added, *(module.name for module in pkgutil.iter_modules(__path__))}


def choose(config: EngineConfig) -> type[Backend]:
    """Return the backend class for these options.

    Raises ConfigError if --kernels names no backend, if the backend needs a package that is not
    installed, or if options contradict each other.
    """
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
        raise ConfigError(
            f"--kv-dtype {config.kv_dtype} needs the native kernels, which {reason} excludes"
        )
    if obstacle := backend.obstacle(config):
        raise ConfigError(f"--kernels {name} contradicts {obstacle}")
    return backend


def _find(name: str, reason: str) -> type[Backend]:
    """Return the backend class with this name. Raises ConfigError if there is none or if a package
    it needs is not installed; `reason`: the option that selected the backend, for that message."""
    if name in _added:
        return _added[name]
    if name not in names():
        supported = ", ".join(("auto", *sorted(names())))
        raise ConfigError(f"--kernels {name} is not supported; supported: {supported}")
    try:
        backend: type[Backend] = import_module(f"{__name__}.{name}").BACKEND
    except ModuleNotFoundError as error:
        if name not in EXTRAS or error.name not in ("torch", "triton"):
            raise
        raise ConfigError(
            f"{reason} needs {error.name}: pip install 'pdserve[{EXTRAS[name]}]'"
        ) from None
    return backend
