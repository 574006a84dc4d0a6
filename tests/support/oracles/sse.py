"""Server-sent events as OpenAI's API frames them."""

import json
from typing import Any


def events(body: str) -> list[dict[str, Any]]:
    """Return the objects of a whole stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
