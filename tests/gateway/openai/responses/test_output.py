"""The events of an answer add up to its items, for random answers."""

import json
import random
from typing import Any

from builders.random_parts import random_answer, said

from pdserve.gateway.http.api import object_json
from pdserve.gateway.openai.responses.output import ResponseOutput
from pdserve.text import ContentPart, Delta, LogprobEntry, ReasoningPart, ScoredToken, TextPart

KINDS = {"message": "TextPart", "reasoning": "ReasoningPart"}


def plain(value: Any) -> Any:
    """A value as a client reads it."""
    return json.loads(object_json({"it": value}).text())["it"]


def sent(event: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in event.items()}


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, rebuilt from the events as a client does it."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert all(item["status"] != "in_progress" for item in items), "items must not overlap"
            items.append({**event["item"]})
            continue
        item = items[event["output_index"]]
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            made = {**item, "status": event["item"]["status"]}
            assert made == event["item"]
            items[-1] = made
        elif kind == "content_part.added":
            item["content"] = [{**event["part"]}]
        elif kind == "content_part.done":
            assert item["content"] == [event["part"]]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert item["arguments"] == event["arguments"]
        elif kind == "reasoning_summary_part.added":
            item["summary"] = [{**event["part"]}]
        elif kind == "reasoning_summary_part.done":
            assert item["summary"] == [event["part"]]
        elif kind == "reasoning_summary_text.delta":
            item["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind == "reasoning_summary_text.done":
            assert item["summary"][event["summary_index"]]["text"] == event["text"]
        elif kind.endswith("_text.delta"):
            item["content"][0]["text"] += event["delta"]
        else:
            assert kind.endswith("_text.done")
            assert item["content"][0]["text"] == event["text"]
    return items


def test_events_add_up_to_the_items() -> None:
    answers = [random_answer(random.Random(seed)) for seed in range(500)]
    assert sum(len(said(deltas)) > 3 for deltas in answers) > 100
    for deltas in answers:
        for summarized in (False, True):
            check(deltas, summarized)


def check(deltas: list[Delta], summarized: bool) -> None:
    output = ResponseOutput("x", logprobs=False, summarized=summarized)
    events = [sent(event) for delta in deltas for event in output.push(delta)]
    items = [plain(item) for item in output.items]
    assert rebuilt(events) == items
    received = [
        (KINDS.get(item["type"]) or f"call {item['call_id'][5:]}",
         item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in items
    ]  # fmt: skip
    assert received == (said(deltas) or [("TextPart", "")])
    ends = {"length": "incomplete"}.get(deltas[-1].finish or "", "completed")
    for item in items:
        if item["type"] == "reasoning":
            text = {"type": "summary_text", "text": item["content"][0]["text"]}
            assert item["summary"] == ([text] if summarized else [])
    statuses = [item["status"] for item in items]
    assert statuses == ["completed"] * (len(statuses) - 1) + [ends]


def scored(text: str) -> ScoredToken:
    return ScoredToken(LogprobEntry(id=1, raw=text.encode(), logprob=-1.0), (), 0)


def test_log_probabilities_match_the_text() -> None:
    """Cover text after a thought in the same delta, withheld text, and the end."""
    received: list[tuple[tuple[ContentPart, ...], str]] = [
        ((ReasoningPart("a"),), "a"),
        ((), "b"),
        ((ReasoningPart("c"), TextPart("d")), "d"),
        ((), "e"),
        ((TextPart("ef"),), "f"),
        ((), "<end>"),
    ]
    output = ResponseOutput("x", logprobs=True)
    events: list[dict[str, Any]] = []
    for number, (content, token) in enumerate(received, 1):
        finish = "stop" if token == "<end>" else None
        delta = Delta(0, content, (scored(token),), number, finish)
        events += map(sent, output.push(delta))
    message = plain(output.items[1])["content"][0]
    assert [one["token"] for one in message["logprobs"]] == ["b", "d", "e", "f", "<end>"]
    deltas = [event["logprobs"] for event in events if event["type"].endswith("output_text.delta")]
    assert [[one["token"] for one in part] for part in deltas] == [["b", "d"], ["e", "f"]]
