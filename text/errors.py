"""Errors of text handling: TextError is the client's fault, UnsupportedTokenizer the model's."""

# Longer texts are refused unread: real text has about 4 characters a token, and the longest runs of
# spaces in today's vocabularies have about 64.
CHARS_PER_TOKEN = 64


class TextError(Exception):
    """The text of a request is invalid; `str(error)` is public, `param` names the field."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class TooLong(TextError):
    """A prompt is too long: it has at least `num_tokens` tokens."""

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


class ContextExceeded(TextError):
    """A prompt, or a prompt and its answer, exceeds the model's context."""


def least_tokens(num_chars: int) -> int:
    """Return how many tokens a text of so many characters has at least."""
    return -(-num_chars // CHARS_PER_TOKEN)


class UnsupportedTokenizer(Exception):
    """A model's tokenizer or chat template cannot be used; `str(error)` is the reason."""
