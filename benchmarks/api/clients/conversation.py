"""The conversation of every client's script, and its report: `checked` prints one JSON object.

The model is small, so the checks cover only whether an answer has the requested form and whether
the client's library parsed it, not its content.
"""

import json
import os
from collections.abc import Callable

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MODEL", "SmolLM2-135M-Instruct")
KEY = os.environ.get("API_KEY", "none")

QUESTION = "What is the weather in Paris?"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20, "pattern": "^[A-Z][a-z]+$"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20, "pattern": "^[A-Z][a-z]+$"},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
    },
    "required": ["name", "inhabitants"],
    "additionalProperties": False,
}


def is_weather(arguments: dict[str, object]) -> bool:
    """Whether the arguments of a call are those of the weather tool."""
    return set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")


def checked(*checks: Callable[[], bool]) -> None:
    """Whether the arguments of a call match the weather tool."""
    found: dict[str, object] = {}
    for check in checks:
        try:
            found[check.__name__] = bool(check())
        except Exception as error:
            found[check.__name__] = f"{type(error).__name__}: {error}"[:300]
    ok = all(value is True for value in found.values())
    print(json.dumps({"ok": ok, **found}))
    raise SystemExit(not ok)
