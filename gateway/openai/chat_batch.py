"""/v1/chat/completions/batch, as in vLLM: several conversations in, one choice for each out."""

import asyncio
from dataclasses import replace
from typing import Any

from pdserve.gateway.http.answers.json_text import JsonPieces, array_json, object_json
from pdserve.gateway.openai.bodies.schema import ChatBatchBody
from pdserve.gateway.openai.chat import ChatReply
from pdserve.gateway.openai.usage import usage_object
from pdserve.gateway.prepared_completion import Usage
from pdserve.gateway.requests.caller import Caller
from pdserve.gateway.sampling import check_logprobs
from pdserve.gateway.service import Service

# Open conversations of a batch; with log-probabilities, which take memory, only one is open.
AT_ONCE = 16


async def chat_batch(service: Service, body: ChatBatchBody, caller: Caller) -> JsonPieces:
    """Return the JSON text of the answer. Each conversation is a request; the first error ends all.
    Raises ServiceError."""
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
