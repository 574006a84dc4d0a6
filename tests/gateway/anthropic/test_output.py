"""The events of an answer add up to its blocks, for random answers."""

import random
from typing import Any

from builders.random_parts import random_answer, said
from pydantic_core import from_json

from pdserve.gateway.anthropic.api import MessageContent
from pdserve.text import Delta

KINDS = {"text": "TextPart", "thinking": "ReasoningPart"}


def test_events_add_up_to_the_blocks() -> None:
    answers = [random_answer(random.Random(seed)) for seed in range(500)]
    assert sum(len(said(deltas)) > 3 for deltas in answers) > 100
    assert (
        sum(getattr(part, "cut", False) for d in answers for one in d for part in one.content) > 9
    )
    for deltas in answers:
        check(deltas)


def check(deltas: list[Delta]) -> None:
    content = MessageContent()
    received: list[tuple[str, str]] = []
    open_block: dict[str, Any] | None = None
    for event in (event for delta in deltas for event in content.push(delta)):
        if event["type"] == "content_block_start":
            assert open_block is None, "blocks must not overlap"
            assert event["index"] == len(received)
            open_block = event["content_block"]
            kind = KINDS.get(open_block["type"]) or f"call {open_block['id'][5:]}"
            received.append((kind, ""))
            continue
        assert open_block is not None
        assert event["index"] == len(received) - 1
        if event["type"] == "content_block_stop":
            open_block = None
        else:
            kind, piece = event["delta"].values()
            assert piece, "a delta must not be empty"
            if kind == "signature_delta":
                open_block["signature"] = piece
                continue
            received[-1] = received[-1][0], received[-1][1] + piece
    assert open_block is None
    assert received == said(deltas)
    for block, (_, text) in zip(content.blocks, received, strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == from_json(text or "{}", allow_partial=True)
        else:
            assert block[block["type"]] == text
            assert "citations" not in block
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert content.stop_reason == reasons[deltas[-1].finish or ""]
