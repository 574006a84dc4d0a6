"""The backends: each is one module here that has the name of its --kernels value and a Backend
named BACKEND; a module elsewhere calls `register`. One is imported only when it is chosen.
"""

import pkgutil
from collections.abc import Collection
from importlib import import_module

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.execution.backend import Backend

EXTRA = "it computes with torch, which is not installed: pip install 'pdserve[torch]'"
_added: dict[str, type[Backend]] = {}


class BackendUnavailable(ValueError):
    """What computes the model cannot be had here; the message says what to install."""


def register(backend: type[Backend]) -> None:
    """Make a backend known. Raises ValueError if its name is taken."""
    if backend.name in names():
        raise ValueError(f"backend {backend.name} is registered twice")
    _added[backend.name] = backend


def names() -> Collection[str]:
    """Of all backends; none is imported for it."""
    return {*_added, *(module.name for module in pkgutil.iter_modules(__path__))}


def choose(config: EngineConfig) -> type[Backend]:
    """The backend for these options. Raises ValueError for options that contradict each other and
    BackendUnavailable."""
    # float32 weights are asked for when exactness against other implementations matters.
    native = config.kernels == "native" or (
        config.kernels == "auto" and config.weights != "float32"
    )
    reason = f"--kernels {config.kernels} --weights {config.weights}"
    if native:
        backend = _find("native", "")
        obstacle = backend.obstacle(config)
        if not obstacle:
            return backend
        if config.kernels == "native":
            raise ValueError(f"--kernels native contradicts {obstacle}")
        reason = obstacle
    if config.kv_dtype == "int8":
        raise ValueError(f"--kv-dtype int8 needs the native kernels, which {reason} excludes")
    name = "reference" if config.kernels == "auto" else config.kernels
    backend = _find(name, reason)
    if obstacle := backend.obstacle(config):
        raise ValueError(f"--kernels {name} contradicts {obstacle}")
    return backend


def _find(name: str, reason: str) -> type[Backend]:
    """`reason`: the options that led to it."""
    if name in _added:
        return _added[name]
    if name not in names():
        known = ", ".join(sorted(names()))
        raise ValueError(f"--kernels {name} is not known; known: {known}")
    try:
        found: type[Backend] = import_module(f"{__name__}.{name}").BACKEND
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BackendUnavailable(f"{reason} needs the {name} backend, and {EXTRA}") from None
    return found
