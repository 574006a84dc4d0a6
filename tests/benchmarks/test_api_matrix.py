"""The requests of line 4 of the API: their number, the coverage of all fields, and that none is
refused."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from line4_modes import LEAST
from matrix import ENDPOINTS, Endpoint, needs_tools, paths, requests
from replies import joined_chunks, joined_events

from pdserve.gateway.anthropic.schema import parse_messages
from pdserve.gateway.openai.bodies.body import parse
from pdserve.gateway.openai.bodies.schema import ChatBody, CompletionBody, parse_tokenize
from pdserve.gateway.openai.responses.schema import parse_responses

PARSERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "/v1/chat/completions": partial(parse, ChatBody),
    "/v1/completions": partial(parse, CompletionBody),
    "/v1/responses": parse_responses,
    "/v1/messages": parse_messages,
    "/tokenize": parse_tokenize,
}


def test_there_are_enough_requests_over_all_paths() -> None:
    asked = requests("m")
    assert sum(not needs_tools(body) for _, body in asked) >= LEAST
    assert paths(asked).keys() == PARSERS.keys()


def test_every_body_is_accepted() -> None:
    for path, body in requests("m"):
        parsed = PARSERS[path](body)
        if hasattr(parsed, "sampling"):
            parsed.sampling()


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.kind.__name__)
def test_every_value_is_requested(endpoint: Endpoint) -> None:
    asked = [body for path, body in requests("m") if path == endpoint.path]
    for name, values in endpoint.values.items():
        for value in values:
            assert any(body.get(name) == value for body in asked), (name, value)


def test_joined_chunks_do_not_depend_on_cuts() -> None:
    def chunk(text: str, **more: Any) -> dict[str, Any]:
        call = {"index": 0, "function": {"arguments": text}}
        return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, **more}]}

    scored = {"logprobs": {"content": [1]}}
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None}]}
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"total_tokens": 3}}
    whole = joined_chunks([opening, chunk('{"a"', **scored), chunk(": 1}", **scored), ended, usage])
    assert whole["choices"] == [
        {
            "index": 0,
            "delta": {
                "role": "assistant",
                "tool_calls": {0: {"function": {"arguments": '{"a": 1}'}}},
            },
            "logprobs": {"content": [1, 1]},
            "finish_reason": "stop",
        }
    ]
    assert whole["usage"] == [{"total_tokens": 3}]


def test_joined_events_do_not_depend_on_cuts() -> None:
    def events(*texts: str) -> list[dict[str, Any]]:
        deltas = [{"type": "delta", "delta": {"type": "text_delta", "text": t}} for t in texts]
        some = [{"type": "begin"}, *deltas, {"type": "end"}]
        return [{**event, "sequence_number": i} for i, event in enumerate(some)]

    assert joined_events(events("ab", "c")) == joined_events(events("a", "b", "c"))
    assert joined_events(events("ab")) != joined_events(events("abc"))


def test_lines_run_existing_tests() -> None:
    root = Path(__file__).parents[2]
    named = {
        (module.name, path)
        for module in (root / "benchmarks").rglob("line*.py")
        for path in re.findall(r'"(tests/[\w/]+(?:\.py)?)[":]', module.read_text())
    }
    assert len(named) > 5
    assert not {name for name in named if not (root / name[1]).exists()}
