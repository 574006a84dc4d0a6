"""Reads the requests of `pdserve bench --dataset`: a JSONL file, or ShareGPT's JSON file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 2 << 30
HUMAN = ("human", "user")  # ShareGPT's names for the client


class DatasetError(ValueError):
    """Raised if a dataset cannot be read; the message names the file and the line or entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request of a dataset: either `prompt` or `messages` is set. `max_tokens` is None unless the
    dataset sets it."""

    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None


def read_dataset(path: Path) -> list[Entry]:
    """Return the requests of a file, in its order. Raises DatasetError.

    A file that begins with "[" is ShareGPT's: a list of objects whose `conversations` have texts
    (`value`) with authors (`from`); the first text of the human is the prompt, and conversations
    without one are skipped. Another file has a JSON object with `prompt` or `messages`, and
    optionally `max_tokens`, in each line that is not empty.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DatasetError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DatasetError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from None
    of_file = _sharegpt if text.lstrip().startswith("[") else _jsonl
    entries = list(of_file(path, text))
    if not entries:
        raise DatasetError(f"{path} has no requests")
    return entries


def _jsonl(path: Path, text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _entry(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")


def _entry(value: Any, where: str) -> Entry:
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: not a JSON object")
    prompt, messages, max_tokens = (value.get(k) for k in ("prompt", "messages", "max_tokens"))
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise DatasetError(f"{where}: max_tokens must be a whole number from 1")
    if isinstance(prompt, str) and prompt and messages is None:
        return Entry(prompt=prompt, max_tokens=max_tokens)
    is_list = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if prompt is None and messages and is_list:
        return Entry(messages=tuple(messages), max_tokens=max_tokens)
    raise DatasetError(f"{where}: needs a prompt (a text) or messages (a list of objects)")


def _sharegpt(path: Path, text: str) -> Iterator[Entry]:
    for number, item in enumerate(_parsed(text, str(path))):
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise DatasetError(f"{path}, entry {number}: needs `conversations`, a list")
        for turn in turns:
            if isinstance(turn, dict) and turn.get("from") in HUMAN and turn.get("value"):
                yield Entry(prompt=str(turn["value"]))
                break


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not JSON: {error}") from None
