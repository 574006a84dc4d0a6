"""/v1/chat/completions: generates an answer to a conversation, whole or in chunks; and
/v1/chat/completions/batch, which takes several conversations, as in vLLM."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import JsonPieces, array_json, object_json
from pdserve.gateway.http.responses import DirectWrite
from pdserve.gateway.openai import objects
from pdserve.gateway.openai.objects import StreamUsage, TextChunk, usage_object
from pdserve.gateway.openai.request_models import ChatBatchBody, ChatBody
from pdserve.gateway.openai.request_models.tools import CustomInput
from pdserve.gateway.prepared_completion import Usage
from pdserve.gateway.sampling import check_logprobs
from pdserve.gateway.service import Service
from pdserve.text import (
    ChatCompletionRequest,
    ContentPart,
    Delta,
    ToolCallPart,
    calls_of,
    only_text,
    reasoning_of,
    text_of,
)

# Open conversations of a batch; with log-probabilities, which take memory, only one is open.
AT_ONCE = 16


class ChatReply:
    """Generates the chat completion for a validated request body. Call either `whole` or `chunks`,
    once."""

    def __init__(self, service: Service, body: ChatBody, caller: Caller) -> None:
        """Build the chat request. Raises ServiceError for fields of the body that contradict each
        other."""
        self._service = service
        self._body = body
        self._request = ChatCompletionRequest(
            body.model,
            body.conversation(),
            body.sampling(),
            (body.cache_salt or "").encode(),
            body.priority or 0,
            body.truncate_prompt_tokens,
            body.tool_use(),
            separate_reasoning=body.separates_reasoning,
        )
        self._id = f"chatcmpl-{caller.request_id}"
        self._caller = body.called_by(caller, self._id)
        self._created = int(time.time())
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._custom = body.custom_tools
        self._inputs: dict[tuple[int, int], CustomInput] = {}  # by choice and call

    async def whole(self) -> JsonPieces:
        """Generate the whole answer and return its JSON text. Log-probabilities are converted in
        small pieces, since all at once would block the event loop. Raises ServiceError."""
        head, choices, usage = await self.collected()
        texts = array_json(map(object_json, choices))
        return object_json({**head, "choices": texts, "usage": usage_object(usage)})

    async def collected(self) -> tuple[dict[str, Any], list[dict[str, Any]], Usage]:
        """Generate the whole answer and return its top-level fields, its choices and its usage
        separately. Raises ServiceError."""
        async with self._service.prepare(self._request, self._caller) as completion:
            if (num_top := self._body.prompt_logprobs) is not None:
                objects.check_prompt_logprobs(completion.prompts, 1, num_top, "prompt_logprobs")
            answers, usage = await self._service.completions.collect(
                completion, partial(objects.ChatLogprobsText, self._as_ids)
            )
            choices: list[dict[str, Any]] = [
                {
                    "index": answer.index,
                    "message": self._message(answer.content),
                    "logprobs": answer.scores.pieces() if self._body.logprobs else None,
                    "finish_reason": self._finish(answer.finish),
                    **({} if answer.stop is None else {"stop_reason": answer.stop}),
                }
                for answer in answers
            ]
            head = self._head("chat.completion", completion.model.card.name)
            if self._body.return_token_ids:
                head["prompt_token_ids"] = list(completion.prompts[0].ids)
                for choice, answer in zip(choices, answers, strict=True):
                    choice["token_ids"] = answer.ids
            if num_top is not None:
                head["prompt_logprobs"] = await objects.prompt_json(
                    completion.model.text.vocabulary,
                    completion.prompts[0].ids,
                    answers[0].prompt_scores,
                    num_top,
                )
            return head, choices, usage

    async def chunks(
        self, direct: DirectWrite
    ) -> AsyncGenerator[dict[str, Any] | JsonPieces, None]:
        """Yield the answer in chunks: for each choice its role, then text and tool calls, then the
        finish reason; at the end the usage, if requested. A chunk is an object or its JSON text.
        Chunks with only text are sent through `direct` while the client keeps up, and are not
        yielded. Raises ServiceError."""
        async with self._service.prepare(self._request, self._caller) as completion:
            head = self._head("chat.completion.chunk", completion.model.card.name)
            usage = StreamUsage(self._body, completion)
            body = self._body
            text_only = not (body.logprobs or body.return_token_ids or body.continuous_usage)
            text_chunks: dict[int, TextChunk] = {}

            def write(choice: int, text: str) -> bool:
                chunk = text_chunks.get(choice)
                return chunk is not None and chunk.write(text, direct)

            stream = self._service.completions.stream(completion, write if text_only else None)
            async with aclosing(stream) as items:
                async for item in items:
                    if isinstance(item, Usage):
                        if self._body.include_usage:
                            yield {**head, "choices": [], "usage": usage_object(item)}
                        continue
                    if item.choice not in text_chunks:
                        first_delta = {"role": "assistant", "content": "", "refusal": None}
                        first = {**head, "choices": [_choice(item.choice, first_delta)]}
                        if self._body.return_token_ids and not text_chunks:
                            first["prompt_token_ids"] = list(completion.prompts[0].ids)
                        yield first | usage.before()
                        text_chunks[item.choice] = self._text_chunk(head, item.choice, usage)
                    if text_only and (text := only_text(item)):
                        yield text_chunks[item.choice].of(text)
                        continue
                    usage_fields = usage.after(item)
                    if item.content or item.tokens or (item.ids and self._body.return_token_ids):
                        for choice in self._contents(item):
                            yield {**head, "choices": [choice]} | usage_fields
                    if item.finish is not None:
                        for input_delta in self._late_inputs(item.choice):
                            yield {
                                **head,
                                "choices": [_choice(item.choice, input_delta)],
                            } | usage_fields
                        last_choice = _choice(item.choice, {}, self._finish(item.finish))
                        if item.stop_reason is not None:
                            last_choice["stop_reason"] = item.stop_reason
                        yield {**head, "choices": [last_choice]} | usage_fields

    @staticmethod
    def _text_chunk(head: dict[str, Any], choice: int, usage: StreamUsage) -> TextChunk:
        usage_fields = usage.before()
        return TextChunk(
            lambda text: {**head, "choices": [_choice(choice, {"content": text})]} | usage_fields
        )

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _finish(self, finish: str) -> str:
        """Return the finish reason for the client. If `tool_choice` names the tool that must be
        called, a tool call ends with "stop", as in OpenAI and vLLM, instead of "tool_calls"."""
        choice = self._body.tool_choice
        is_named = isinstance(choice, dict) and choice.get("type") in ("function", "custom")
        return "stop" if is_named and finish == "tool_calls" else finish

    def _message(self, content: Sequence[ContentPart]) -> dict[str, Any]:
        text, calls = text_of(content), calls_of(content)
        thought = reasoning_of(content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not (calls or thought) else None,
            "refusal": None,
        }
        if thought and self._body.shows_reasoning:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [self._whole_call(call) for call in calls]
        return message

    def _contents(self, delta: Delta) -> list[dict[str, Any]]:
        """Convert a delta to choice objects for separate chunks: one for its reasoning, one for its
        text, and one for each piece of a tool call. The first has the log-probabilities and ids of
        all its tokens."""
        deltas = self._pieces(delta.choice, delta.content)
        if not deltas:
            if not (delta.tokens or self._body.return_token_ids):
                return []  # reasoning that is left out
            deltas.append({"content": ""})
        choices = [_choice(delta.choice, content_delta) for content_delta in deltas]
        if self._body.logprobs:
            choices[0]["logprobs"] = objects.chat_logprobs(delta.tokens, self._as_ids)
        if self._body.return_token_ids:
            choices[0]["token_ids"] = list(delta.ids)
        return choices

    def _pieces(self, choice: int, content: Sequence[ContentPart]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        text, thought = text_of(content), reasoning_of(content)
        if thought and self._body.shows_reasoning:
            deltas.append({"reasoning_content": thought})
        if text:
            deltas.append({"content": text})
        for part in content:
            if not (isinstance(part, ToolCallPart) and (part.id or part.arguments)):
                continue
            if call := self._call_piece(choice, part):
                deltas.append({"tool_calls": [{"index": part.index, **call}]})
        return deltas

    def _call_piece(self, choice: int, part: ToolCallPart) -> dict[str, Any] | None:
        """Return a piece of a tool call in the client's format; None if the call is of a custom
        tool and the piece has no part of the tool's input."""
        if part.id and part.name in self._custom:
            new_input = self._inputs[choice, part.index] = CustomInput()
            return _custom_call(part, new_input.push(part.arguments))
        custom_input = self._inputs.get((choice, part.index))
        if custom_input is None:
            return _call(part)
        piece = custom_input.push(part.arguments)
        return {"custom": {"input": piece}} if piece else None

    def _late_inputs(self, choice: int) -> Iterator[dict[str, Any]]:
        """Yield, at the end of a choice, the inputs of custom tools that could not be extracted
        from the model's arguments earlier."""
        for (owner, index), custom_input in self._inputs.items():
            if owner == choice and (rest := custom_input.finish()):
                yield {"tool_calls": [{"index": index, "custom": {"input": rest}}]}

    def _whole_call(self, call: ToolCallPart) -> dict[str, Any]:
        if call.name not in self._custom:
            return _call(call)
        custom_input = CustomInput()
        return _custom_call(call, custom_input.push(call.arguments) + custom_input.finish())


def _choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _call(part: ToolCallPart) -> dict[str, Any]:
    """Return a function call, or a piece of one, in OpenAI's format. Only the first piece has the
    call's id and name."""
    if not part.id:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def _custom_call(part: ToolCallPart, text: str) -> dict[str, Any]:
    return {"id": part.id, "type": "custom", "custom": {"name": part.name, "input": text}}


async def chat_batch(service: Service, body: ChatBatchBody, caller: Caller) -> JsonPieces:
    """Generate an answer to each conversation of the batch, and return the JSON text of the
    response. Each conversation is a separate request; the first error cancels all. Raises
    ServiceError."""
    choices: dict[int, dict[str, Any]] = {}
    heads: list[dict[str, Any]] = []
    total = Usage(0, 0, 0)
    numbers = iter(range(len(body.messages)))

    async def worker() -> None:
        nonlocal total
        for number in numbers:
            chat_caller = replace(caller, request_id=f"{caller.request_id}-{number}")
            reply = ChatReply(service, body.chat(number), chat_caller)
            head, (choice,), usage = await reply.collected()
            ids = head.pop("prompt_token_ids", None)
            extra = {} if ids is None else {"prompt_token_ids": ids}
            choices[number] = {**choice, "index": number, **extra}
            heads.append(head)
            total += usage
            check_logprobs(body.sampling(), total.completion_tokens, "fewer conversations, or ")

    num_workers = 1 if body.logprobs else min(AT_ONCE, len(body.messages))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    texts = array_json(object_json(choices[number]) for number in range(len(choices)))
    head = {**heads[0], "id": f"chatcmpl-{caller.request_id}"}
    return object_json({**head, "choices": texts, "usage": usage_object(total)})
