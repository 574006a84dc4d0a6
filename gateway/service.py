"""Turns a client's request into a prepared completion: limits, model, template, tokens, parameters.

HTTP and gRPC both enter here. Invariant: however the `prepare` block ends, the request no longer
counts in the limits and its line is in the log.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from pdserve.gateway.admission import AdmissionLimits, AdmittedRequest
from pdserve.gateway.caller import Caller
from pdserve.gateway.catalog import Catalog, ServedModel
from pdserve.gateway.completion import Completions
from pdserve.gateway.metrics import (
    CountUsage,
    GatewayMetrics,
    GatewayProcesses,
    RequestLog,
    RequestMetrics,
    uncounted,
)
from pdserve.gateway.model_overrides import NO_OVERRIDES, ModelOverrides
from pdserve.gateway.model_texts import ModelTexts, check_ids, kept_ids
from pdserve.gateway.pooling import PoolingRuns, PreparedInputs
from pdserve.gateway.prepared_completion import PreparedCompletion, Prompt, ToolLoop
from pdserve.gateway.router_client import Upstream
from pdserve.gateway.sampling import client_errors, refuse, to_wire
from pdserve.services.common.capabilities import generates
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rate_limits import RateLimits
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.text import (
    AnswerFormat,
    ChatCompletionRequest,
    ClientRequest,
    Constraints,
    ParserChoice,
    RequestedSampling,
    TextCompletionRequest,
    check_sampling,
)
from pdserve.text.workers import LoadedTokenizer, TokenizerPool, prepare_constraints

MAX_TOTAL_CHOICES = 512  # of all prompts of a request together
PROMPTS_AT_ONCE = 8  # prompts whose parameters are made before other tasks run

NextTurn = Callable[[PreparedCompletion, ChatCompletionRequest, int], Awaitable[PreparedCompletion]]


class ServerTools(Protocol):
    """Tools that the gateway offers to every chat besides the client's."""

    def offer(
        self, request: ChatCompletionRequest, next_turn: NextTurn
    ) -> tuple[ChatCompletionRequest, ToolLoop | None]:
        """Return the request with these tools, and the loop that runs it if one may be called."""


@dataclass(frozen=True, slots=True)
class Records:
    """Where requests are counted. `count_usage` is called for each request that has used a model;
    `processes` know the requests of the other gateway processes."""

    metrics: GatewayMetrics
    clock: Callable[[], float]
    count_usage: CountUsage = uncounted
    tracer: Tracer = NO_TRACER
    processes: GatewayProcesses = field(default_factory=GatewayProcesses)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How a Service treats all requests. `template_kwargs`: names that clients may set for a chat
    template. `thinking`: whether models think if a request does not say it; None: the template
    decides. `strict_max_tokens`: refuse a max_tokens beyond the context. `aliases`, `any_model` and
    `overrides` are the Catalog's."""

    timeout_s: float
    queue_timeout_s: float
    template_kwargs: Collection[str] = ()
    thinking: bool | None = None
    parsers: ParserChoice = field(default_factory=ParserChoice)
    strict_max_tokens: bool = False
    aliases: Sequence[str] = ()
    any_model: bool = False
    overrides: ModelOverrides = NO_OVERRIDES
    server_tools: ServerTools | None = None


class PromptTokens(NamedTuple):
    """The ids of a prompt, and its text if the answer echoes it."""

    ids: Sequence[int]
    text: str = ""


class Service:
    """Entry point of all APIs: prepares requests, and owns the parts that run them."""

    def __init__(
        self,
        upstream: Upstream,
        text_pool: TokenizerPool,
        limits: AdmissionLimits,
        rates: RateLimits,
        records: Records,
        options: ServiceOptions,
    ) -> None:
        self.upstream = upstream
        self.catalog = Catalog(
            upstream,
            text_pool,
            options.aliases,
            options.any_model,
            options.parsers,
            options.strict_max_tokens,
            options.overrides,
        )
        self.completions = Completions(upstream, records.clock)
        self.pooling = PoolingRuns(upstream, records.clock)
        self.parsers = options.parsers
        self.texts = ModelTexts(rates, options.template_kwargs, options.thinking)
        self.limits = limits
        self.rates = rates
        self.metrics = records.metrics
        self.requests = RequestLog()
        self.clock = records.clock
        self.processes = records.processes
        self.tracer = records.tracer
        self._count_usage = records.count_usage
        self._options = options

    @asynccontextmanager
    async def prepare(
        self, request: ClientRequest, caller: Caller
    ) -> AsyncIterator[PreparedCompletion]:
        """Yield the completion to run inside the block. Raises ServiceError."""
        owner = caller.tenant.id
        text = request if isinstance(request, TextCompletionRequest) else None
        async with self._open(caller) as (admitted, meter):
            async with self._counted(caller):
                model = await self.catalog.get(request.model)
                self.check_request(request, model)
                tool_loop: ToolLoop | None = None
                if isinstance(request, ChatCompletionRequest):
                    request, tool_loop = self._offered(request, model, caller)
                prompts, sampling, form = await self._prompts(request, model, owner)
                num_tokens = sum(len(prompt.ids) for prompt in prompts)
                await self.rates.count_tokens(owner, num_tokens)
            meter.begin(model.card.name, num_tokens)
            meter.span.set(gen_ai__operation__name="text_completion" if text else "chat")
            caller.acceptance.note()
            yield PreparedCompletion(
                id=caller.request_id,
                model=model,
                prompts=prompts,
                sampling=sampling,
                admitted=admitted,
                meter=meter,
                timeout_s=self._options.timeout_s,
                queue_timeout_s=self._options.queue_timeout_s,
                continues=request.continues,
                echo=text is not None and text.echo,
                echo_only=text is not None and text.echo_only,
                cache_salt=caller.tenant.cache_salt(request.cache_salt),
                priority=request.priority,
                tenant=owner,
                tool_loop=tool_loop,
                format=form,
            )

    async def _prompts(
        self, request: ClientRequest, model: ServedModel, owner: bytes
    ) -> tuple[list[Prompt], RequestedSampling, AnswerFormat]:
        """Return the prompts of a checked request with their parameters, the sampling with the
        constraints of tools and reasoning, and how the answer is read. Raises ServiceError."""
        steps, tokens = model.preparation, await self.prompt_tokens(request, model, owner)
        prompts: list[Prompt] = []
        with client_errors():
            sampling, form = steps.format(request, tokens[0].ids)
            constraints = await self._constraints(sampling, model, owner)
            for index, (ids, text) in enumerate(tokens, start=1):
                params = steps.params(request, sampling, constraints, ids)
                prompts.append(Prompt(ids, text, to_wire(params)))
                if index % PROMPTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        return prompts, sampling, form

    @asynccontextmanager
    async def prepare_inputs(
        self,
        operation: str,
        model_name: str,
        tokenized: Callable[[ServedModel], Awaitable[Sequence[Collection[int]]]],
        cache_salt: bytes,
        priority: int,
        caller: Caller,
    ) -> AsyncIterator[PreparedInputs]:
        """Prepare the prompts that `tokenized` makes for the model, each with one answer, to run
        inside the block. `operation`: its name in traces. Raises ServiceError."""
        owner = caller.tenant.id
        async with self._open(caller) as (admitted, meter):
            async with self._counted(caller):
                model = await self.catalog.get(model_name)
                inputs = await tokenized(model)
                num_tokens = sum(map(len, inputs))
                await self.rates.count_tokens(owner, num_tokens)
            meter.begin(model.card.name, num_tokens)
            meter.span.set(gen_ai__operation__name=operation)
            yield PreparedInputs(
                id=caller.request_id,
                model=model,
                inputs=inputs,
                admitted=admitted,
                meter=meter,
                timeout_s=self._options.timeout_s,
                queue_timeout_s=self._options.queue_timeout_s,
                cache_salt=caller.tenant.cache_salt(cache_salt),
                priority=priority,
                tenant=owner,
            )

    @asynccontextmanager
    async def _open(self, caller: Caller) -> AsyncIterator[tuple[AdmittedRequest, RequestMetrics]]:
        """Count a request in the limits, and log its line at the end."""
        began = self.clock() if caller.received is None else caller.received
        span = self.tracer.begin("request", caller.trace, began, entry=True)
        if span.context.span_id not in ("", caller.trace.span_id):  # not the client's own
            caller.headers["traceparent"] = span.context.parent
        meter = RequestMetrics(self.metrics, caller, self.clock, self._count_usage, span)
        owner = caller.tenant.id
        error: BaseException | None = None
        try:
            with self.limits.admit(owner, caller.background) as admitted:
                self.requests.began(meter)
                yield admitted, meter
        except BaseException as caught:
            error = caught
            raise
        finally:
            meter.close(error)
            self.requests.ended(meter)
            self.rates.tokens_spent(owner, meter.num_generated)

    async def _next_turn(
        self, completion: PreparedCompletion, request: ChatCompletionRequest, number: int
    ) -> PreparedCompletion:
        """Return the completion for the next turn of a tool loop. Raises ServiceError."""
        owner = completion.tenant
        # The client cannot know the length of this prompt: the context cuts max_tokens.
        lenient = replace(completion.model.preparation, strict=False)
        model = replace(completion.model, preparation=lenient)
        (prompt,), sampling, form = await self._prompts(request, model, owner)
        await self.rates.count_tokens(owner, len(prompt.ids))
        completion.meter.next_turn(len(prompt.ids))
        elapsed_s = self.clock() - completion.meter.arrived
        return replace(
            completion,
            id=f"{completion.id}-{number}",
            prompts=[prompt],
            sampling=sampling,
            format=form,
            queue_timeout_s=elapsed_s + self._options.queue_timeout_s,
        )

    @asynccontextmanager
    async def _counted(self, caller: Caller) -> AsyncIterator[None]:
        """Count one request; at the end, add the remaining rates to the answer's headers."""
        try:
            await self.rates.count_request(caller.tenant.id)
            yield
        finally:
            caller.headers.update(await self.rates.headers(caller.tenant.id))

    async def count(self, caller: Caller) -> None:
        """Count one request that runs no model. Raises ServiceError."""
        async with self._counted(caller):
            pass

    async def count_prompt(self, request: ChatCompletionRequest, caller: Caller) -> int:
        """Return the number of tokens of a chat's prompt, without running a model. Raises
        ServiceError."""
        owner = caller.tenant.id
        with self.limits.admit(owner):
            await self.count(caller)
            model = await self.catalog.get(request.model)
            return len(await self.prompt_ids(request, model, caller))

    async def prompt_ids(
        self, request: ChatCompletionRequest, model: ServedModel, caller: Caller
    ) -> list[int]:
        """Return the prompt of a chat, with the tools that it is offered. Raises ServiceError."""
        request, _ = self._offered(request, model, caller)
        return await self._chat_ids(request, model, caller.tenant.id)

    def _offered(
        self, request: ChatCompletionRequest, model: ServedModel, caller: Caller
    ) -> tuple[ChatCompletionRequest, ToolLoop | None]:
        """Add the tools of MCP servers if the model can call tools. Return the request, and the
        loop that carries out the calls of these tools; None if there are no such tools."""
        tools = self._options.server_tools
        # A line of a batch may run again, which would repeat the effects of its calls.
        if tools is None or caller.background or not self.may_call_tools(model.text):
            return request, None
        return tools.offer(request, self._next_turn)

    def check_request(self, request: ClientRequest, model: ServedModel) -> None:
        """Check a request except for its prompts: the kind of the model, the sampling and the
        number of choices. Raises ServiceError."""
        is_text = isinstance(request, TextCompletionRequest)
        if not generates(model.card):
            raise not_supported("Completions" if is_text else "Chat Completions")
        with client_errors():
            check_sampling(request.sampling)
            model.preparation.check_model_bounds(request.sampling)
        if isinstance(request, TextCompletionRequest):
            choices = len(request.prompts) * (request.sampling.best_of or request.sampling.n)
            if choices > MAX_TOTAL_CHOICES:
                text = f"{choices} choices in total; at most {MAX_TOTAL_CHOICES} are allowed"
                raise refuse("n", text)

    async def prompt_tokens(
        self, request: ClientRequest, model: ServedModel, owner: bytes
    ) -> list[PromptTokens]:
        """Return the prompts of a request, of which a chat has one, each checked to leave room for
        its answer. Raises ServiceError."""
        if isinstance(request, ChatCompletionRequest):
            ids = _kept(request, await self._chat_ids(request, model, owner), model)
            with client_errors():
                model.preparation.check_prompt(request, ids)
            return [PromptTokens(ids)]
        return [
            await self._text_tokens(request, prompt, model, owner) for prompt in request.prompts
        ]

    async def _text_tokens(
        self,
        request: TextCompletionRequest,
        prompt: str | Sequence[int],
        model: ServedModel,
        owner: bytes,
    ) -> PromptTokens:
        param = request.prompt_field
        if isinstance(prompt, str):
            add_special = request.add_special_tokens
            all_ids: Sequence[int] = await self.texts.text_ids(
                model, prompt, param, owner, add_special_tokens=add_special
            )
        else:
            all_ids = prompt
        ids = _kept(request, all_ids, model)
        with client_errors():
            model.preparation.check_prompt(request, ids)
        if isinstance(prompt, str) and len(ids) == len(all_ids):
            return PromptTokens(ids, prompt)
        if request.echo:
            text = await self.texts.decode(model, ids, param, owner, skip_special=False)
            return PromptTokens(ids, text)
        check_ids(ids, model, param)
        return PromptTokens(ids)

    async def _chat_ids(
        self, request: ChatCompletionRequest, model: ServedModel, owner: bytes
    ) -> list[int]:
        with client_errors():
            conversation = model.preparation.conversation(request)
        return await self.texts.chat_ids(model, conversation, owner)

    async def _constraints(
        self, sampling: RequestedSampling, model: ServedModel, owner: bytes
    ) -> Constraints:
        """Return the constraints on the answers besides their sampling; empty ones if there are
        none. Raises TextError, ServiceError."""
        if not sampling.is_constrained:
            return Constraints()
        await self.rates.check_text(owner)
        return await prepare_constraints(sampling, model.text, owner)

    def may_call_tools(self, text: LoadedTokenizer) -> bool:
        """Return whether the model's template shows tools, and its calls are parsed."""
        family, _ = self.parsers.families(text.tool_parser, "")
        return bool(text.tool_parser) and family is not None

    def may_reason(self, text: LoadedTokenizer) -> bool:
        """Return whether reasoning in the model's answers is parsed."""
        _, family = self.parsers.families("", text.reasoning_parser)
        return family is not None


def _kept(request: ClientRequest, ids: Sequence[int], model: ServedModel) -> Sequence[int]:
    """Apply `kept_ids`, leaving room for the answer that the client requests, at most half of the
    context. The operator's maximum has no effect: an endpoint picker does not know it, and must
    keep the same ids."""
    context_len = model.card.context_len
    answer_len = min(request.sampling.max_tokens or 1, context_len // 2)
    return kept_ids(ids, request.kept_tokens, model, context_len - answer_len)


def not_supported(api: str, remedy: str = "") -> ServiceError:
    """Return the error for a model of another kind, in vLLM's words. `remedy`: what an operator can
    do, e.g. "; start ..."."""
    return refuse("model", f"The model does not support {api} API{remedy}")
