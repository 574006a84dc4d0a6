"""/v1/completions: texts or token ids in, their continuations out."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pdserve.gateway.caller import Caller
from pdserve.gateway.choice import ScoredToken
from pdserve.gateway.completion import Usage
from pdserve.gateway.content.requests import TextCompletionRequest
from pdserve.gateway.openai import logprobs
from pdserve.gateway.openai.bodies.schema import CompletionBody
from pdserve.gateway.openai.usage import StreamUsage, usage_object
from pdserve.gateway.service import Service
from pdserve.gateway.text.parts import ContentPart, text_of


class CompletionReply:
    """One plain completion; make it after the body is checked, then take `whole` or `chunks`."""

    def __init__(self, service: Service, body: CompletionBody, caller: Caller) -> None:
        """Raises ServiceError for fields that contradict each other."""
        self._service = service
        self._body = body
        self._request = TextCompletionRequest(
            body.model,
            body.prompt,
            body.sampling(),
            echo=bool(body.echo),
            echo_only=body.echo_only,
            add_special_tokens=body.add_special_tokens is not False,
            cache_salt=(body.cache_salt or "").encode(),
            kept_tokens=body.truncate_prompt_tokens,
        )
        self._id = f"cmpl-{caller.request_id}"
        self._caller = body.called_by(caller, self._id)
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        async with self._service.prepare(self._request, self._caller) as completion:
            answers, usage = await self._service.completions.collect(completion)
            choices = []
            for answer in answers:
                choice = self._choice(answer.index, answer.content, answer.tokens, answer.finish)
                prompt = completion.prompts[answer.index // completion.sampling.n]
                if self._body.return_token_ids:
                    choice |= {"prompt_token_ids": list(prompt.ids), "token_ids": answer.ids}
                if (num_top := self._body.prompt_logprobs) is not None:
                    vocabulary = completion.model.text.vocabulary
                    scores = answer.prompt_scores
                    choice["prompt_logprobs"] = await logprobs.of_prompt(
                        vocabulary, prompt.ids, scores, num_top
                    )
                choices.append(choice)
            head = self._head(completion.model.card.name)
            return {**head, "choices": choices, "usage": usage_object(usage)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        async with self._service.prepare(self._request, self._caller) as completion:
            head = self._head(completion.model.card.name)
            counted = StreamUsage(self._body, completion)
            begun: set[int] = set()
            async with aclosing(self._service.completions.stream(completion)) as items:
                async for item in items:
                    if not isinstance(item, Usage):
                        choice = self._choice(item.choice, item.content, item.tokens, item.finish)
                        if self._body.return_token_ids:
                            choice["token_ids"] = list(item.ids)
                            if item.choice not in begun:
                                begun.add(item.choice)
                                prompt = completion.prompts[item.choice // completion.sampling.n]
                                choice["prompt_token_ids"] = list(prompt.ids)
                        yield {**head, "choices": [choice]} | counted.after(item)
                    elif self._body.include_usage:
                        yield {**head, "choices": [], "usage": usage_object(item)}

    def _head(self, model: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": "text_completion", "created": self._created, "model": model,
        }  # fmt: skip

    def _choice(
        self,
        index: int,
        content: Sequence[ContentPart],
        tokens: Sequence[ScoredToken],
        finish: str | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text_of(content),
            "logprobs": None
            if self._body.logprobs is None
            else logprobs.of_completion(tokens, bool(self._body.return_tokens_as_token_ids)),
            "finish_reason": finish,
        }
