"""Reads a chat template from a file that an operator names in place of a model's own template."""

from datetime import datetime
from os import PathLike
from pathlib import Path

from pdserve.text.errors import UnsupportedTokenizer
from pdserve.text.templates.environment import MAX_SOURCE_CHARS, compile_template

_MAX_BYTES = 4 * MAX_SOURCE_CHARS  # a character has at most 4 bytes in UTF-8


def read_template(path: str | PathLike[str]) -> bytes:
    """Return the source of the chat template in the file. Raises ValueError with the reason if the
    file cannot be read, is not UTF-8, is too long or does not compile."""
    try:
        with Path(path).open("rb") as file:
            source = file.read(_MAX_BYTES + 1)
        if not source.strip():
            raise ValueError("the chat template is empty")
        compile_template(source.decode(), datetime.now)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the chat template is not valid UTF-8") from None
    except (UnsupportedTokenizer, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return source
