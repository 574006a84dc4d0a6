"""Reads the tokens of `tokenizer.ggml.*`, their types and other properties."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.engine.checkpoints.source import CheckpointError

# llama_token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"  # SentencePiece's character for a space


def token_at(tokens: Sequence[str], index: Any) -> str:
    """Return the token with the id `index`. Raises CheckpointError if it is not an id."""
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(f"GGUF token id {index!r} is outside the vocabulary of {len(tokens)}")
    return tokens[index]


def strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    """Return the strings of `tokenizer.ggml.NAME`. Raises CheckpointError if there are none."""
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not all(isinstance(t, str) for t in found):
        raise CheckpointError(f"GGUF tokenizer.ggml.{name} is not a list of strings")
    return found


def numbers(metadata: Mapping[str, Any], name: str, length: int) -> list[Any] | None:
    """Return the numbers of `tokenizer.ggml.NAME`, one for each token; None if the file has none.
    Raises CheckpointError if there are more or fewer."""
    found = metadata.get(f"tokenizer.ggml.{name}")
    if found is None:
        return None
    if len(found) != length:
        raise CheckpointError(f"GGUF tokenizer.ggml.{name} has {len(found)} items, not {length}")
    return list(found)
