"""The differences between a prefill and a decode process."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import grpc.aio

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.services.worker.core import WorkerCore
from pdserve.services.worker.runtime import WorkerRuntime
from pdserve.services.worker.settings import WorkerSettings

Params = ParamSpec("Params")
SettingsT = TypeVar("SettingsT", bound=WorkerSettings)
CoreT = TypeVar("CoreT", bound=WorkerCore[Any, Any])
RuntimeT = TypeVar("RuntimeT", bound=WorkerRuntime)


class WorkerRole(ABC, Generic[SettingsT, CoreT, RuntimeT]):
    """A worker's core, and factories of its servicer and runtime. Construct it in the running
    loop."""

    service: ClassVar[str]  # full name of its gRPC service

    def __init__(self, settings: SettingsT, config: EngineConfig, core: CoreT) -> None:
        self.settings = settings
        self.core = core
        self.runtime: RuntimeT | None = None  # set when the model is loaded
        self._config = config
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer; it refuses work until `attach`."""

    @abstractmethod
    def make_runtime(self, engine: Engine, card: CardData, boot: bytes) -> RuntimeT:
        """Make the engine's thread and hand-offs; called on the loading thread."""

    def build(self, boot: bytes, progress: Callable[[str, float], None]) -> RuntimeT:
        """Load the model, on the loading thread. `boot` identifies this life of the process."""
        config = replace(self._config, threads=self.settings.threads)
        engine, card = build_engine(config, progress)
        self.runtime = self.make_runtime(engine, card, boot)
        return self.runtime

    def attach(self) -> None:
        """Begin to take work with the built runtime; on the loop."""
        assert self.runtime is not None  # built
        self.core.attach(self.runtime)

    def on_loop(self, fn: Callable[Params, None]) -> Callable[Params, None]:
        """Wrap `fn` for other threads: it runs on the loop, in the order of the calls."""

        def post(*args: Params.args, **kwargs: Params.kwargs) -> None:
            self._loop.call_soon_threadsafe(partial(fn, *args, **kwargs))

        return post
