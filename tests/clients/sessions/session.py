"""Common parts of every session: the tools, the user's messages and the expected results.

Runs in a client's own environment, so it imports nothing else.
"""

import os
from collections.abc import Awaitable, Callable

from tools import list_files, write_file

BASE_URL = os.environ["BASE_URL"]
MODEL = "agent"
KEY = "a-key"
IDLE_S = 3.0  # after this silence a stream is given up
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


def converse(
    turn: Callable[[list, str], str],
    messages: list,
    overflow: type[Exception],
    thoughts: Callable[[], str | None] = lambda: None,
) -> None:
    """Send the user's messages. `turn` adds a text and its answer to `messages`, and returns the
    answer; for a prompt that is too long it raises `overflow`.
    """
    listed = turn(messages, LIST)
    turn(messages, WRITE)
    check(listed, turn(messages, RECALL), thoughts())
    before = list(messages)
    try:
        turn(messages, TOO_LONG)
    except overflow:
        assert "turn 4" in turn(before, RECALL)
    else:
        raise AssertionError("the prompt was taken")


async def converse_async(
    turn: Callable[[list, str], Awaitable[tuple[str, list]]],
    overflow: type[Exception],
    thoughts: Callable[[list], str | None] = lambda messages: None,
) -> None:
    """Like `converse`, with a `turn` that returns the answer and the conversation that includes
    it.
    """
    listed, messages = await turn([], LIST)
    _, messages = await turn(messages, WRITE)
    recalled, messages = await turn(messages, RECALL)
    check(listed, recalled, thoughts(messages))
    try:
        await turn(messages, TOO_LONG)
    except overflow:
        recalled, _ = await turn(messages, RECALL)
        assert "turn 4" in recalled
    else:
        raise AssertionError("the prompt was taken")


def check(listed: str, recalled: str, thoughts: str | None = None) -> None:
    """Check the first and the third answer; the test checks the file of the second."""
    assert f"The tool has answered: {SEEN}" in listed, listed
    assert "turn 3 with 2 results" in recalled, recalled
    assert thoughts is None or "I look at what was said" in thoughts, thoughts
