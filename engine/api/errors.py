"""Errors that a caller of the engine can cause; `param` names the request field at fault."""


class EngineError(Exception):
    """A request that the engine rejects. The message is fit for a client."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(EngineError):
    """A field is invalid, or this engine can never run the request."""


class ContextLengthExceeded(EngineError):
    """The prompt and its completion can never fit."""


class QueueFull(EngineError):
    """The bounded queue is full; the caller may retry later."""
