"""Errors of text handling: a TextError is the client's fault, UnsupportedTokenizer the model's."""


class TextError(Exception):
    """A request's text cannot be used; `str(error)` is public, `param` names the field."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class UnsupportedTokenizer(Exception):
    """A model's tokenizer or chat template cannot be used; says why."""
