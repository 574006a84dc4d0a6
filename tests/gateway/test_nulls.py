"""Fields absent from the answers of an API's origin are absent here too: strict clients accept null
only where the origin sends it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from builders.api_fields import LEAST, MESSAGES, RESPONSES
from fakes.tool_model import THINKING, ToolModel, calls
from oracles.http_errors import CHAT

pytestmark = pytest.mark.anyio
FUNCTION: dict[str, Any] = {"name": "f"}
TOOLS: dict[str, Any] = {
    CHAT: {"type": "function", "function": FUNCTION},
    RESPONSES: {"type": "function", **FUNCTION},
    MESSAGES: {**FUNCTION, "input_schema": {"type": "object"}},
}
# Fields that can be null in answers of OpenAI and Anthropic.
ORIGIN: dict[str, set[str]] = {
    CHAT: {"content", "refusal", "logprobs", "finish_reason"},
    RESPONSES: {
        "completed_at", "error", "incomplete_details", "instructions", "max_output_tokens",
        "max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier", "usage",
        "user",
        "effort", "summary",  # of reasoning
        "parameters",  # of a tool
    },
    MESSAGES: {"stop_reason", "stop_sequence"},
}  # fmt: skip


def nulls(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (name for name, one in value.items() if one is None)
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from nulls(one)


async def test_only_fields_that_the_origin_sends_as_null_are_null(
    make_http: Any, subtests: pytest.Subtests
) -> None:
    answer = f"<think>hm</think>Let me see. {calls('f')}"
    for path, known in ORIGIN.items():
        client = make_http(ToolModel(answer, template=THINKING))
        for stream in (False, True):
            with subtests.test(path=path, stream=stream):
                room = {} if path == RESPONSES else {"max_tokens": 1000}
                body = {**LEAST[path], **room, "tools": [TOOLS[path]], "stream": stream}
                reply = await client.post(path, json=body)
                assert reply.status_code == 200, reply.text
                lines = [one.removeprefix("data: ") for one in reply.text.splitlines()]
                sent = [json.loads(one) for one in lines if one.startswith("{")]
                assert len(sent) > 8 if stream else len(sent) == 1
                assert '"name":"f"' in reply.text
                assert any(kind in reply.text for kind in ("reasoning_", '"thinking"'))
                found = set(nulls(sent))
                assert found, "at least one null must be found"
                assert found <= known
