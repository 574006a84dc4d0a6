"""The lines of `pdserve complete`: one request per line in the input, one result per line in the
output. Pure.

A line is like those of OpenAI's batches (custom_id, url, body), or a body with "prompt" or
"messages" and optionally an "id".
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (PLAIN, CHAT, "/v1/embeddings", "/v1/responses")
IDS = ("custom_id", "id")


class BadLine(Exception):
    """A line is not a valid request; the message says why."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line's request, and the id of its result."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def line_id(line: Mapping[str, Any], number: int) -> str:
    """The line's own id, or its number (from 1)."""
    for name in IDS:
        if isinstance(line.get(name), str | int) and line[name] != "":
            return str(line[name])
    return f"line-{number}"


def parse_line(data: bytes) -> Mapping[str, Any]:
    """Raises BadLine if the line is not a JSON object."""
    try:
        line = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the line is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise BadLine("the line is not a JSON object")
    return line


def request_of(line: Mapping[str, Any], custom_id: str, defaults: Mapping[str, Any]) -> InputLine:
    """The line's request; `defaults` are fields for bodies that lack them. Raises BadLine if the
    line has no valid request."""
    if "body" in line:
        body, url = line["body"], line.get("url", CHAT)
        if not isinstance(body, dict):
            raise BadLine("body must be an object")
        if url not in URLS:
            raise BadLine(f"url must be one of {', '.join(URLS)}, not {str(url)[:80]!r}")
    elif "messages" in line or "prompt" in line:
        body = {name: value for name, value in line.items() if name not in IDS}
        url = CHAT if "messages" in line else PLAIN
    else:
        raise BadLine('the line has neither "body" nor "messages" nor "prompt"')
    return InputLine(custom_id, url, {**defaults, **body, "stream": False})


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) for lines that are not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line


def answer_line(custom_id: str, status: int, body: Any) -> dict[str, Any]:
    """The result of a line with a response of any status."""
    return {
        "custom_id": custom_id,
        "response": {"status_code": status, "body": body},
        "error": None,
    }


def error_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The result of a line that could not be sent."""
    return {"custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def failed(result: Mapping[str, Any]) -> bool:
    response = result.get("response")
    return not response or response.get("status_code") != 200
