"""Answers of random parts, as a pipeline could give them, for property tests."""

import json
import random

from pdserve.text import ContentPart, Delta, ReasoningPart, TextPart, ToolCallPart

PIECES = ("", "a", '"b": 1', "é\n", ", ", "}", "<x>")
FINISHES = ("stop", "length", "tool_calls")


def random_answer(rng: random.Random) -> list[Delta]:
    """Return deltas with none, one or several parts, the last one with a finish; some end in an
    unfinished call.
    """
    parts: list[ContentPart] = []
    calls = 0
    for _ in range(rng.randrange(9)):
        kind = rng.randrange(3)
        if kind == 0:
            parts.append(ToolCallPart(calls, f"call_{calls}", f"f{calls}"))
            arguments = json.dumps(dict.fromkeys(rng.choices(PIECES, k=rng.randrange(4)), "é\n"))
            size = rng.randrange(1, 9)
            pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
            parts += [ToolCallPart(calls, arguments=piece) for piece in pieces]
            calls += 1
        else:
            parts.append((TextPart if kind == 1 else ReasoningPart)(rng.choice(PIECES)))
    finish = rng.choice(FINISHES)
    if finish == "length" and parts and isinstance(parts[-1], ToolCallPart):
        parts[-1] = ToolCallPart(calls - 1, cut=True)
    deltas = []
    while parts:
        count = rng.randrange(4)
        taken, parts = parts[:count], parts[count:]
        deltas.append(Delta(0, tuple(taken), (), len(deltas) + 1, None))
    return [*deltas, Delta(0, (), (), len(deltas) + 1, finish)]


def said(deltas: list[Delta]) -> list[tuple[str, str]]:
    """Return the kind and the text of each run of parts that belong together."""
    runs: list[tuple[str, str]] = []
    for part in (part for delta in deltas for part in delta.content):
        if isinstance(part, ToolCallPart):
            kind, text = f"call {part.index}", part.arguments
        else:
            kind, text = type(part).__name__, part.text
        before = runs.pop()[1] if runs and runs[-1][0] == kind else ""
        runs.append((kind, before + text))
    return runs
