"""Reading of JSON files next to the weights: an object or a list of objects, of bounded size."""

import json
from pathlib import Path
from typing import Any

from pdserve.engine.checkpoints.source import CheckpointError

MAX_BYTES = 64 << 20
MAX_JSON_BYTES = 4 << 20  # parsing may take thirty times as much; Gemma's largest has 1.1 MiB


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a whole file. Raises CheckpointError if it is unreadable or larger than `limit`."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if len(data) > limit:
        raise CheckpointError(f"{path} is larger than {limit} bytes")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if the content is anything else."""
    value = _read(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a list of JSON objects from a file. Raises CheckpointError."""
    value = _read(path)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise CheckpointError(f"{path} is not a list of JSON objects")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error


def read_json_if_exists(path: Path) -> dict[str, Any]:
    """Read a JSON object like read_json; return an empty one if the file is missing."""
    return read_json(path) if path.exists() else {}
