"""What the interceptors need to know of gRPC's method handlers."""

from typing import Any

_BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def behaviour_of(handler: Any) -> tuple[str, Any]:
    """The one field of an RpcMethodHandler that is set: its name and the function."""
    (kind,) = (name for name in _BEHAVIOURS if getattr(handler, name) is not None)
    return kind, getattr(handler, kind)
