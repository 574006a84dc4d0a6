"""What every session has: the tools, what a person says, and what has to come of it.

Runs in a client's own environment, so it imports nothing else.
"""

import os

from tools import list_files, write_file

BASE_URL = os.environ["BASE_URL"]
MODEL = "agent"
KEY = "a-key"
IDLE_S = 3.0  # a silent stream is given up
SEEN = "harbour-lights.txt"
LIST, WRITE, RECALL = "[[list .]]", "[[write long.txt]]", "[[recall]]"
TOO_LONG = "[[recall]]" + " The tide comes in, and the boats rise." * 5000


def run_tool(name: str, arguments: dict[str, str]) -> str:
    return {"list_files": list_files, "write_file": write_file}[name](**arguments)


def parameters(*names: str) -> dict[str, object]:
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": list(names)}


SCHEMAS = {
    "list_files": ("List the files of a folder.", parameters("folder")),
    "write_file": ("Write a text file.", parameters("path", "content")),
}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
    for name, (about, schema) in SCHEMAS.items()
]


def check(listed: str, recalled: str, thoughts: str | None = None) -> None:
    """The first and the third answer; the file of the second is checked by the test."""
    assert f"The tool has answered: {SEEN}" in listed, listed
    assert "turn 3 with 2 results" in recalled, recalled
    assert thoughts is None or "I look at what was said" in thoughts, thoughts
