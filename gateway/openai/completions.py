"""/v1/completions: generates continuations of texts or token ids, whole or in chunks."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import AT_ONCE, JsonPieces, array_json, object_json
from pdserve.gateway.http.responses import DirectWrite
from pdserve.gateway.openai import objects
from pdserve.gateway.openai.objects import StreamUsage, TextChunk, usage_object
from pdserve.gateway.openai.request_models import CompletionBody
from pdserve.gateway.prepared_completion import PreparedCompletion, Usage
from pdserve.gateway.service import Service
from pdserve.text import ContentPart, TextCompletionRequest, TextPart, text_of


class CompletionReply:
    """Generates the plain completion for a validated request body. Call either `whole` or `chunks`,
    once."""

    def __init__(self, service: Service, body: CompletionBody, caller: Caller) -> None:
        """Build the completion request. Raises ServiceError for fields of the body that contradict
        each other."""
        self._service = service
        self._body = body
        self._request = TextCompletionRequest(
            body.model,
            body.prompts(),
            body.sampling(),
            body.prompt_field,
            echo=bool(body.echo),
            echo_only=body.echo_only,
            add_special_tokens=body.add_special_tokens is not False,
            cache_salt=(body.cache_salt or "").encode(),
            priority=body.priority or 0,
            kept_tokens=body.truncate_prompt_tokens,
        )
        self._id = f"cmpl-{caller.request_id}"
        self._caller = body.called_by(caller, self._id)
        self._created = int(time.time())
        self._as_ids = bool(body.return_tokens_as_token_ids)

    async def whole(self) -> JsonPieces:
        """Generate all continuations and return the JSON text of the response. Log-probabilities
        are converted in small pieces, since all at once would block the event loop. Raises
        ServiceError."""
        async with self._service.prepare(self._request, self._caller) as completion:
            self._check(completion)
            answers, usage = await self._service.completions.collect(
                completion, partial(objects.CompletionLogprobsText, self._as_ids)
            )
            prompt_logprobs: dict[int, JsonPieces] = {}  # log-probabilities, by prompt
            choices = []
            for answer in answers:
                number = answer.index // completion.sampling.n
                prompt = completion.prompts[number]
                choice = self._choice(answer.index, answer.content, answer.finish)
                if answer.stop is not None:
                    choice["stop_reason"] = answer.stop
                if self._body.logprobs is not None:
                    choice["logprobs"] = answer.scores.pieces()
                if self._body.return_token_ids:
                    choice |= {"prompt_token_ids": list(prompt.ids), "token_ids": answer.ids}
                if (num_top := self._body.prompt_logprobs) is not None:
                    if number not in prompt_logprobs:
                        prompt_logprobs[number] = await objects.prompt_json(
                            completion.model.text.vocabulary,
                            prompt.ids,
                            answer.prompt_scores,
                            num_top,
                        )
                    choice["prompt_logprobs"] = prompt_logprobs[number]
                choices.append(object_json(choice))
            head = self._head(completion.model.card.name)
            fields = {"choices": array_json(choices), "usage": usage_object(usage)}
            return object_json({**head, **fields})

    async def chunks(
        self, direct: DirectWrite
    ) -> AsyncGenerator[dict[str, Any] | JsonPieces, None]:
        """Yield the continuations in chunks, each an object or its JSON text; at the end the usage,
        if requested. Chunks with only text are sent through `direct` while the client keeps up, and
        are not yielded. Raises ServiceError."""
        async with self._service.prepare(self._request, self._caller) as completion:
            self._check(completion)
            head = self._head(completion.model.card.name)
            usage = StreamUsage(self._body, completion)
            body = self._body
            scored = body.logprobs is not None
            text_only = not (scored or body.return_token_ids or body.continuous_usage)
            started_choices: set[int] = set()
            texts: dict[int, TextChunk] = {}

            def write(choice: int, text: str) -> bool:
                if choice not in texts:
                    texts[choice] = self._text_chunk(head, choice, usage)
                return texts[choice].write(text, direct)

            stream = self._service.completions.stream(completion, write if text_only else None)
            async with aclosing(stream) as items:
                async for item in items:
                    if not isinstance(item, Usage):
                        choice = self._choice(item.choice, item.content, item.finish)
                        if item.stop_reason is not None:
                            choice["stop_reason"] = item.stop_reason
                        is_long = len(item.tokens) > AT_ONCE and scored
                        if is_long:
                            logprobs_text = objects.CompletionLogprobsText(self._as_ids)
                            await logprobs_text.add(item.tokens)
                            choice["logprobs"] = logprobs_text.pieces()
                        elif scored:
                            choice["logprobs"] = objects.completion_logprobs(
                                item.tokens, self._as_ids
                            )
                        if self._body.return_token_ids:
                            choice["token_ids"] = list(item.ids)
                            if item.choice not in started_choices:
                                started_choices.add(item.choice)
                                prompt = completion.prompts[item.choice // completion.sampling.n]
                                choice["prompt_token_ids"] = list(prompt.ids)
                        usage_fields = usage.after(item)
                        if is_long:
                            choices = array_json([object_json(choice)])
                            yield object_json({**head, "choices": choices, **usage_fields})
                        else:
                            yield {**head, "choices": [choice]} | usage_fields
                    elif self._body.include_usage:
                        yield {**head, "choices": [], "usage": usage_object(item)}

    def _text_chunk(self, head: dict[str, Any], choice: int, usage: StreamUsage) -> TextChunk:
        usage_fields = usage.before()

        def chunk(text: str) -> dict[str, Any]:
            return {
                **head,
                "choices": [self._choice(choice, (TextPart(text),), None)],
            } | usage_fields

        return TextChunk(chunk)

    def _head(self, model: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": "text_completion", "created": self._created, "model": model,
        }  # fmt: skip

    def _choice(
        self, index: int, content: Sequence[ContentPart], finish: str | None
    ) -> dict[str, Any]:
        text = text_of(content)
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def _check(self, completion: PreparedCompletion) -> None:
        """Raise ServiceError if the prompts have more log-probabilities than an answer may have."""
        n = completion.sampling.n
        for param, num_top in (
            ("prompt_logprobs", self._body.prompt_logprobs),
            ("logprobs", self._body.logprobs if self._body.echo else None),
        ):
            if num_top is not None:
                objects.check_prompt_logprobs(completion.prompts, n, num_top, param)
