"""From a client's request to a prepared completion: limits, model, template, tokens, parameters.

REST and gRPC both enter here. Invariant: however the `prepare` block ends, the request no longer
counts in the limits and its line is in the log.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from pdserve.gateway.catalog import Catalog, ServedModel, TextExecutor
from pdserve.gateway.completion import Completions, PreparedCompletion, Prompt
from pdserve.gateway.limits import AdmissionLimits
from pdserve.gateway.observability.meter import Meter
from pdserve.gateway.observability.metrics import GatewayMetrics
from pdserve.gateway.router_client.upstream import Upstream
from pdserve.gateway.sampling import RequestedSampling, check, refuse, resolve
from pdserve.gateway.text.errors import TextError
from pdserve.protos.common_pb2 import CONTEXT_LENGTH_EXCEEDED
from pdserve.services.host.errors import ServiceError

# Longer texts are refused unread: real text has about 4 characters a token, the longest runs
# of spaces in vocabularies of today some 64.
CHARS_PER_TOKEN = 64
MAX_TOTAL_CHOICES = 512


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """A chat completion as a client asks for it; messages have the shape that templates expect."""

    model: str
    messages: Sequence[Mapping[str, Any]]
    sampling: RequestedSampling
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class TextCompletionRequest:
    """A plain completion of texts or token ids, as a client asks for it."""

    model: str
    prompts: Sequence[str | Sequence[int]]
    sampling: RequestedSampling
    echo: bool = False
    echo_only: bool = False
    add_special_tokens: bool = True
    cache_salt: bytes = b""


class Service:
    """What the APIs call; holds no state of its own."""

    def __init__(
        self,
        upstream: Upstream,
        executor: TextExecutor,
        limits: AdmissionLimits,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        timeout_s: float,
        queue_timeout_s: float,
    ) -> None:
        self.upstream = upstream
        self.catalog = Catalog(upstream, executor)
        self.completions = Completions(upstream, clock)
        self.limits = limits
        self.metrics = metrics
        self._executor = executor
        self._clock = clock
        self._timeout_s = timeout_s
        self._queue_timeout_s = queue_timeout_s

    @asynccontextmanager
    async def prepare(
        self,
        asked: ChatCompletionRequest | TextCompletionRequest,
        request_id: str,
        client_id: str = "",
    ) -> AsyncIterator[PreparedCompletion]:
        """The completion to run inside the block. Raises ServiceError.

        `request_id` names it everywhere, `client_id` is what its client calls it.
        """
        meter = Meter(self.metrics, request_id, client_id, self._clock)
        text = asked if isinstance(asked, TextCompletionRequest) else None
        error: BaseException | None = None
        try:
            with self.limits.admit() as admitted:
                model = await self.catalog.get(asked.model)
                check(asked.sampling, model.card)
                if isinstance(asked, ChatCompletionRequest):
                    prompts = [await self._chat_prompt(asked, model)]
                else:
                    prompts = await self._prompts(asked, model)
                meter.begin(model.card.name, sum(len(prompt.ids) for prompt in prompts))
                yield PreparedCompletion(
                    id=request_id,
                    model=model,
                    prompts=prompts,
                    sampling=asked.sampling,
                    admitted=admitted,
                    meter=meter,
                    timeout_s=self._timeout_s,
                    queue_timeout_s=self._queue_timeout_s,
                    continues=text is not None,
                    echo=text is not None and text.echo,
                    echo_only=text is not None and text.echo_only,
                    cache_salt=asked.cache_salt,
                )
        except BaseException as caught:
            error = caught
            raise
        finally:
            meter.close(error)

    async def chat_ids(
        self, model: ServedModel, messages: Sequence[Mapping[str, Any]], *, answer: bool = True
    ) -> list[int]:
        """The token ids of a conversation; `answer` opens the assistant's turn."""
        template = model.text.template
        if template is None:
            raise refuse("messages", f"the model {model.card.name!r} has no chat template")
        chars = sum(len(str(message.get("content") or "")) for message in messages)
        _check_chars(chars, model, "messages")
        tokenizer = model.text.tokenizer
        return await self._executor.run(
            lambda: tokenizer.encode_rendered(
                template.render(messages, add_generation_prompt=answer)
            )
        )

    async def text_ids(
        self, model: ServedModel, text: str, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of a text, special tokens in it parsed."""
        _check_chars(len(text), model, param)
        tokenizer = model.text.tokenizer
        return await self._executor.run(
            lambda: tokenizer.encode(
                text, add_special_tokens=add_special_tokens, parse_special=True
            )
        )

    async def decode(self, model: ServedModel, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of token ids."""
        tokenizer = model.text.tokenizer

        def work() -> str:
            tokenizer.check_ids(ids)
            return tokenizer.decode(ids, skip_special_tokens=skip_special)

        return await self._executor.run(work)

    async def _chat_prompt(self, asked: ChatCompletionRequest, model: ServedModel) -> Prompt:
        ids = await self.chat_ids(model, asked.messages)
        params = resolve(asked.sampling, model.card, model.text.defaults, len(ids), "messages")
        return Prompt(ids, "", params)

    async def _prompts(self, asked: TextCompletionRequest, model: ServedModel) -> list[Prompt]:
        choices = len(asked.prompts) * (asked.sampling.best_of or asked.sampling.n)
        if choices > MAX_TOTAL_CHOICES:
            raise refuse("n", f"{choices} choices in all, at most {MAX_TOTAL_CHOICES}")
        prompts = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                text = prompt
                ids: Sequence[int] = await self.text_ids(
                    model, prompt, "prompt", add_special_tokens=asked.add_special_tokens
                )
            else:
                ids = prompt
                _check_len(len(ids), model, "prompt")
                text = await self._echo_text(asked, model, ids)
            sampling = asked.sampling
            if len(ids) < 2:  # a prompt's first token has no log-probability
                sampling = replace(sampling, prompt_logprobs=None)
            params = resolve(sampling, model.card, model.text.defaults, len(ids), "prompt")
            prompts.append(Prompt(ids, text, params))
        return prompts

    async def _echo_text(
        self, asked: TextCompletionRequest, model: ServedModel, ids: Sequence[int]
    ) -> str:
        try:
            model.text.tokenizer.check_ids(ids)
        except TextError as error:
            raise refuse("prompt", str(error)) from error
        return await self.decode(model, ids, skip_special=False) if asked.echo else ""


def _check_len(count: int, model: ServedModel, param: str) -> None:
    if count >= model.card.context_len:
        raise ServiceError(
            CONTEXT_LENGTH_EXCEEDED,
            f"the model's context is {model.card.context_len} tokens; the prompt has {count}",
            param=param,
        )


def _check_chars(count: int, model: ServedModel, param: str) -> None:
    if count > model.card.context_len * CHARS_PER_TOKEN:
        raise ServiceError(
            CONTEXT_LENGTH_EXCEEDED,
            f"the model's context is {model.card.context_len} tokens; "
            f"a prompt of {count} characters cannot fit",
            param=param,
        )
