"""pdserve: a disaggregated LLM server.

The Python API is lazy: importing this package imports neither torch nor grpc.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.services.llm.llm import LLM as LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pdserve.services.llm.llm import LLM

        return LLM
    raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
