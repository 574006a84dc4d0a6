"""The tool loop: after a turn of the model, the gateway carries out the turn's calls of MCP tools
and runs the model again with their results.

Invariant: a client sees only the tool calls that it has to carry out itself. One turn runs at a
time; closing the stream cancels the current turn and its calls.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import from_json

from pdserve.gateway.mcp.offer import OfferedTool, ToolResult, with_offered
from pdserve.gateway.mcp.servers import McpServers
from pdserve.gateway.prepared_completion import PreparedCompletion, Run, Usage
from pdserve.gateway.service import NextTurn
from pdserve.protos.common_pb2 import CONTEXT_LENGTH_EXCEEDED, DEADLINE_EXCEEDED
from pdserve.services.common.errors import ServiceError
from pdserve.text import (
    ChatCompletionRequest,
    ContentPart,
    Delta,
    TextPart,
    ToolCallPart,
    reasoning_of,
    text_of,
)

MAX_CALLS = 16  # carried out per turn; the model gets an error for further ones


class McpTools:
    """Adds the tools of the MCP servers to chat requests; the `ServerTools` of a Service."""

    def __init__(self, servers: McpServers, max_turns: int, clock: Callable[[], float]) -> None:
        self._servers = servers
        self._max_turns = max_turns
        self._clock = clock

    def offer(
        self, request: ChatCompletionRequest, next_turn: NextTurn
    ) -> tuple[ChatCompletionRequest, "McpToolLoop | None"]:
        """Return the request with the MCP tools added, and the loop that runs it. The loop is None
        if the gateway may call none of the tools itself or the request has several choices; the
        client then gets all calls. No tools are added if the answer must match a structure, since
        it has no place for calls."""
        sampling = request.sampling
        constrained = sampling.structure is not None or sampling.prompt_logprobs is not None
        if (
            not self._servers.offered
            or not request.conversation.add_generation_prompt
            or constrained
        ):
            return request, None  # there is nothing to call, or the answer has no place for calls
        use, added = with_offered(request.tool_use, self._servers.offered)
        if not added:
            return request, None
        request = replace(request, tool_use=use)
        approved = any(tool.approved for tool in added.values())
        if sampling.n > 1 or not approved or not self._max_turns:
            return request, None
        return request, McpToolLoop(
            request, added, self._servers, next_turn, self._max_turns, self._clock
        )


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class ToolTurn:
    """Collects the output of one turn of the model; `push` adds output and returns what the client
    sees of it.

    Tool calls are held back until the turn has a call that the client must carry out; all calls of
    the turn are then passed to the client. With `separated`, the turn's text is preceded by an
    empty line, since the client has text of an earlier turn.
    """

    def __init__(self, is_gateway_call: Callable[[str], bool], *, separated: bool) -> None:
        self._is_gateway_call = is_gateway_call
        self._separated = separated
        self._content: list[ContentPart] = []
        self._held: list[ContentPart] = []
        self._calls: dict[int, _Call] = {}
        self._has_client_call = False

    def push(self, content: Sequence[ContentPart]) -> list[ContentPart]:
        visible: list[ContentPart] = []
        for part in content:
            if not isinstance(part, ToolCallPart):
                self._content.append(part)
                visible += self._separate(part)
                continue
            if part.index not in self._calls:
                self._calls[part.index] = _Call(part.id, part.name)
                self._has_client_call |= not self._is_gateway_call(part.name)
            self._calls[part.index].pieces.append(part.arguments)
            self._held.append(part)
            if self._has_client_call:
                visible += self._held
                self._held = []
        return visible

    def _separate(self, part: ContentPart) -> list[ContentPart]:
        if not self._separated or not isinstance(part, TextPart):
            return [part]
        text = part.text.lstrip()
        self._separated = not text
        return [TextPart(f"\n\n{text}")] if text else []

    @property
    def text(self) -> str:
        return text_of(self._content)

    @property
    def gateway_calls(self) -> list[_Call]:
        """The calls of the turn that the gateway must carry out: all of them, or none if the client
        must carry out at least one."""
        return [] if self._has_client_call else list(self._calls.values())

    def message(self) -> dict[str, Any]:
        """Return the turn as an assistant message with its text, reasoning and tool calls, for the
        prompt of the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if thought := reasoning_of(self._content):
            message["reasoning_content"] = thought
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call.arguments) or {}},
            }
            for call in self._calls.values()
        ]
        return message


def arguments_of(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a tool call as the model wrote them. Empty text is {}; None if the
    text is not a JSON object."""
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class McpToolLoop:
    """Runs one chat request with one choice, turn by turn, until the model makes no more calls that
    the gateway carries out, or until `max_turns`."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        offered: Mapping[str, OfferedTool],
        servers: McpServers,
        next_turn: NextTurn,
        max_turns: int,
        clock: Callable[[], float],
    ) -> None:
        """`offered`: the MCP tools of the request, by the name that the model sees. `next_turn`
        prepares the completion of a further turn. `max_turns`: the calls of at most this many turns
        are carried out."""
        self._request = request
        self._offered = offered
        tools = request.tool_use.tools if request.tool_use is not None else ()
        self._client_names = {tool.name for tool in tools} - offered.keys()
        self._servers = servers
        self._next_turn = next_turn
        self._max_turns = max_turns
        self._clock = clock

    async def stream(
        self, completion: PreparedCompletion, run: Run
    ) -> AsyncGenerator[Delta | Usage, None]:
        """Run all turns; yield their output as deltas of a single choice, then the summed usage of
        all turns. Ends with finish reason "length" if a further turn is not possible."""
        messages = list(self._request.conversation.messages)
        usage = Usage(0, 0, 0)
        num_tokens = 0  # of earlier turns
        num_calls = 0  # of earlier turns
        written = False  # the client has text of earlier turns
        current = completion
        max_tokens = completion.model.preparation.max_tokens(self._request.sampling)
        for number in range(self._max_turns + 1):
            turn = ToolTurn(self._is_gateway_call, separated=written)
            ended = Delta(0, (), (), 0, None)
            async with aclosing(run(current)) as items:
                async for item in items:
                    if isinstance(item, Usage):
                        usage += item
                        continue
                    visible = tuple(turn.push(item.content))
                    total = num_tokens + item.num_tokens
                    delta = item._replace(content=visible, num_tokens=total)
                    if item.finish == "tool_calls" and turn.gateway_calls:
                        ended, delta = delta, delta._replace(finish=None)
                    yield delta
            num_tokens = ended.num_tokens
            written = written or bool(turn.text.strip())
            if ended.finish is None:  # the model has ended, or the client has to carry out calls
                yield usage
                return
            following = None
            remaining = None if max_tokens is None else max_tokens - num_tokens
            if number < self._max_turns and (remaining is None or remaining > 0):
                results = await self._call_all(turn.gateway_calls, num_calls, completion)
                num_calls += len(turn.gateway_calls)
                messages += [turn.message(), *results]
                following = await self._follow(
                    completion, messages, num_tokens, remaining, number + 1
                )
            if following is None:
                completion.meter.cut_short()
                yield Delta(ended.choice, (), (), num_tokens, "length")
                yield usage
                return
            current = following

    def _is_gateway_call(self, name: str) -> bool:
        """Return whether the gateway handles a call of the tool `name` instead of the client. Also
        True for a tool that does not exist: the gateway returns an error to the model."""
        if (offered := self._offered.get(name)) is not None:
            return offered.approved
        return name not in self._client_names

    async def _call_all(
        self, calls: Sequence[_Call], num_before: int, completion: PreparedCompletion
    ) -> list[dict[str, Any]]:
        """Carry out the calls of a turn concurrently and return their results as tool messages, in
        the same order. `num_before` is the number of calls in earlier turns, which count against
        the request's `max_tool_calls`. Raises ServiceError DEADLINE_EXCEEDED when the request's
        time is over."""
        max_calls = self._request.max_tool_calls
        num_allowed = len(calls) if max_calls is None else max_calls - num_before
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._call(call, index, index < num_allowed, completion))
                for index, call in enumerate(calls)
            ]
        results = [task.result() for task in tasks]
        if self._remaining_s(completion) <= 0:
            raise ServiceError(DEADLINE_EXCEEDED, "the request ran longer than its timeout")
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]

    async def _call(
        self, call: _Call, index: int, is_allowed: bool, completion: PreparedCompletion
    ) -> ToolResult:
        offered = self._offered.get(call.name)
        arguments = arguments_of(call.arguments)
        if index >= MAX_CALLS:
            return ToolResult(f"error: at most {MAX_CALLS} calls are allowed at once", True)
        if not is_allowed:
            return ToolResult(
                f"error: at most {self._request.max_tool_calls} tool calls are allowed", True
            )
        if offered is None:
            return ToolResult("error: this tool does not exist", True)
        if arguments is None:
            return ToolResult("error: the arguments are not a JSON object", True)
        remaining_s = max(0.0, self._remaining_s(completion))
        return await self._servers.call(offered, arguments, remaining_s, completion.id)

    def _remaining_s(self, completion: PreparedCompletion) -> float:
        return completion.timeout_s - (self._clock() - completion.meter.arrived)

    async def _follow(
        self,
        completion: PreparedCompletion,
        messages: Sequence[Mapping[str, Any]],
        num_tokens: int,
        remaining: int | None,
        number: int,
    ) -> PreparedCompletion | None:
        """Prepare the next turn for a conversation extended by the last turn's calls and results.
        The answer has `num_tokens` so far and may have `remaining` more; None: no limit. Returns
        None if the context has no room for the prompt and an answer of min_tokens."""
        request = self._request
        min_tokens = max(0, request.sampling.min_tokens - num_tokens)
        following = replace(
            request,
            conversation=replace(request.conversation, messages=messages),
            sampling=replace(request.sampling, min_tokens=min_tokens, max_tokens=remaining),
        )
        try:
            return await self._next_turn(completion, following, number)
        except ServiceError as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED or error.param == "min_tokens":
                return None
            raise
