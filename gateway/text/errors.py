"""Errors of text handling: TextError is the client's fault, UnsupportedTokenizer the model's."""


class TextError(Exception):
    """The text of a request is invalid; `str(error)` is public, `param` names the field."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class TooLong(TextError):
    """A prompt is too long: it has `length` tokens, or as many characters."""

    def __init__(self, message: str, length: int) -> None:
        super().__init__(message)
        self.length = length


class UnsupportedTokenizer(Exception):
    """A model's tokenizer or chat template cannot be used; `str(error)` is the reason."""
