"""pdserve: a disaggregated LLM server, and its engine as a Python API (docs/python.md).

The names are imported when they are first used: this module imports nothing.
"""

TYPE_CHECKING = False  # as typing has it, which takes a while to import
if TYPE_CHECKING:
    from pdserve.engine.api import ContextLengthExceeded as ContextLengthExceeded
    from pdserve.engine.api import EngineConfig as EngineConfig
    from pdserve.engine.api import InvalidRequest as InvalidRequest
    from pdserve.engine.checkpoints import CheckpointError as CheckpointError
    from pdserve.llm.async_engine import AsyncEngine as Engine
    from pdserve.llm.llm import LLM as LLM
    from pdserve.llm.outputs import CompletionOutput as CompletionOutput
    from pdserve.llm.outputs import GenerationError as GenerationError
    from pdserve.llm.outputs import Logprob as Logprob
    from pdserve.llm.outputs import Message as Message
    from pdserve.llm.outputs import OutputDelta as OutputDelta
    from pdserve.llm.outputs import RequestOutput as RequestOutput
    from pdserve.llm.outputs import ToolCall as ToolCall
    from pdserve.llm.sampling import SamplingParams as SamplingParams
    from pdserve.llm.sampling import StructuredOutputsParams as StructuredOutputsParams

_MODULES = {  # where each name is; Engine is AsyncEngine there
    "CheckpointError": "engine.checkpoints.source",
    "CompletionOutput": "llm.outputs",
    "ContextLengthExceeded": "engine.api.request",
    "Engine": "llm.async_engine",
    "EngineConfig": "engine.api.config",
    "GenerationError": "llm.outputs",
    "InvalidRequest": "engine.api.request",
    "LLM": "llm.llm",
    "Logprob": "llm.outputs",
    "Message": "llm.outputs",
    "OutputDelta": "llm.outputs",
    "RequestOutput": "llm.outputs",
    "SamplingParams": "llm.sampling",
    "StructuredOutputsParams": "llm.sampling",
    "ToolCall": "llm.outputs",
}
__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ContextLengthExceeded",
    "Engine",
    "EngineConfig",
    "GenerationError",
    "InvalidRequest",
    "Logprob",
    "Message",
    "OutputDelta",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "ToolCall",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"pdserve.{_MODULES[name]}")
    found = globals()[name] = getattr(module, "AsyncEngine" if name == "Engine" else name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
