"""Turns a client's request into a prepared completion: limits, model, template, tokens, parameters.

REST and gRPC both enter here. Invariant: however the `prepare` block ends, the request no longer
counts in the limits and its line is in the log.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

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
from pdserve.gateway.model_texts import ModelTexts, check_ids, check_room, kept_ids
from pdserve.gateway.pooling import PoolingRuns, PreparedInputs
from pdserve.gateway.prepared_completion import PreparedCompletion, Prompt, ToolLoop
from pdserve.gateway.router_client import Upstream
from pdserve.gateway.sampling import check, client_errors, refuse, resolve
from pdserve.protos.common_pb2 import SamplingParams
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rate_limits import RateLimits
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.text import (
    AnswerFormat,
    ChatCompletionRequest,
    Families,
    ParserChoice,
    RequestedSampling,
    TextCompletionRequest,
    final_text,
    prompt_end,
    shaped,
    thinking_bound,
)
from pdserve.text.answer_format import answer_format
from pdserve.text.workers import (
    LoadedTokenizer,
    TokenizerPool,
    apply_constraints,
    prepare_constraints,
)

MAX_TOTAL_CHOICES = 512


NextTurn = Callable[[PreparedCompletion, ChatCompletionRequest, int], Awaitable[PreparedCompletion]]


class ServerTools(Protocol):
    """Tools that the gateway offers to every chat besides the client's."""

    def offer(
        self, request: ChatCompletionRequest, next_turn: NextTurn
    ) -> tuple[ChatCompletionRequest, ToolLoop | None]:
        """Return the request with these tools, and the loop that runs it if one may be called."""


class Service:
    """Entry point of all APIs."""

    def __init__(
        self,
        upstream: Upstream,
        text_pool: TokenizerPool,
        limits: AdmissionLimits,
        rates: RateLimits,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        timeout_s: float,
        queue_timeout_s: float,
        template_kwargs: Collection[str] = (),
        parsers: ParserChoice | None = None,
        count_usage: CountUsage = uncounted,
        server_tools: ServerTools | None = None,
        tracer: Tracer = NO_TRACER,
        processes: GatewayProcesses | None = None,
        strict_max_tokens: bool = False,
        aliases: Sequence[str] = (),
        any_model: bool = False,
    ) -> None:
        """`template_kwargs`: names that clients may set for a chat template. `count_usage` is
        called for each request that has used a model. `processes` know the requests of the other
        gateway processes. `strict_max_tokens`: refuse a max_tokens beyond the context. `aliases`
        and `any_model` are the Catalog's."""
        self.upstream = upstream
        self.catalog = Catalog(upstream, text_pool, aliases, any_model)
        self.completions = Completions(upstream, clock)
        self.pooling = PoolingRuns(upstream, clock)
        self.parsers = parsers or ParserChoice()
        self.texts = ModelTexts(rates, template_kwargs, self.parsers)
        self.limits = limits
        self.rates = rates
        self.metrics = metrics
        self.requests = RequestLog()
        self.clock = clock
        self._timeout_s = timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._count_usage = count_usage
        self._server_tools = server_tools
        self._strict_max_tokens = strict_max_tokens
        self.tracer = tracer
        self.processes = processes or GatewayProcesses()

    @asynccontextmanager
    async def prepare(
        self,
        request: ChatCompletionRequest | TextCompletionRequest,
        caller: Caller,
    ) -> AsyncIterator[PreparedCompletion]:
        """Yield the completion to run inside the block. Raises ServiceError."""
        owner = caller.tenant.id
        text = request if isinstance(request, TextCompletionRequest) else None
        sampling, form = request.sampling, AnswerFormat()
        tool_loop: ToolLoop | None = None
        async with self._open(caller) as (admitted, meter):
            async with self._counted(caller):
                model = await self.catalog.get(request.model)
                _check_generates(model, "Completions" if text else "Chat Completions")
                check(request.sampling, model.card)
                if isinstance(request, ChatCompletionRequest):
                    request, tool_loop = self._offered(request, model, caller)
                    prompts = [await self._chat_prompt(request, model, owner)]
                    sampling, form = self._shape(request, model, prompts[0].ids)
                else:
                    prompts = await self._prompts(request, model, owner)
                    _, reasoning = self._families(model)
                    with client_errors():
                        sampling = thinking_bound(sampling, reasoning)
                await self._bind(prompts, sampling, model, owner, request.continues)
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
                timeout_s=self._timeout_s,
                queue_timeout_s=self._queue_timeout_s,
                continues=request.continues,
                echo=text is not None and text.echo,
                echo_only=text is not None and text.echo_only,
                cache_salt=caller.tenant.cache_salt(request.cache_salt),
                priority=request.priority,
                tenant=caller.tenant.id,
                tool_loop=tool_loop,
                format=form,
            )

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
                timeout_s=self._timeout_s,
                queue_timeout_s=self._queue_timeout_s,
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
        prompt = await self._chat_prompt(request, completion.model, owner)
        sampling, form = self._shape(request, completion.model, prompt.ids)
        await self._bind([prompt], sampling, completion.model, owner, request.continues)
        await self.rates.count_tokens(owner, len(prompt.ids))
        completion.meter.next_turn(len(prompt.ids))
        elapsed_s = self.clock() - completion.meter.arrived
        return replace(
            completion,
            id=f"{completion.id}-{number}",
            prompts=[prompt],
            sampling=sampling,
            format=form,
            queue_timeout_s=elapsed_s + self._queue_timeout_s,
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
        """Add the tools of MCP servers if the model can call tools; also return the loop that
        carry out their calls, or None without such tools."""
        # A line of a batch may run again, which would repeat the effects of its calls.
        if self._server_tools is None or caller.background or not self.may_call_tools(model.text):
            return request, None
        return self._server_tools.offer(request, self._next_turn)

    async def _bind(
        self,
        prompts: Sequence[Prompt],
        sampling: RequestedSampling,
        model: ServedModel,
        owner: bytes,
        continues: bool,
    ) -> None:
        """Add the constraints on the answers to the parameters of prompts."""
        if not sampling.is_constrained:
            return
        await self.rates.check_text(owner)
        with client_errors():
            constraints = await prepare_constraints(sampling, model.text, owner)
        for prompt in prompts:
            apply_constraints(
                constraints, prompt.params, prompt.ids, model.text.vocabulary, continues=continues
            )

    async def _chat_prompt(
        self, request: ChatCompletionRequest, model: ServedModel, owner: bytes
    ) -> Prompt:
        all_ids = await self._chat_ids(request, model, owner)
        ids = _truncated(all_ids, request.kept_tokens, request.sampling, model)
        field = request.conversation.messages_field
        return Prompt(ids, "", self._params(request.sampling, model, len(ids), field))

    def _params(
        self, sampling: RequestedSampling, model: ServedModel, prompt_len: int, field: str
    ) -> SamplingParams:
        defaults, strict = model.text.defaults, self._strict_max_tokens
        return resolve(sampling, model.card, defaults, prompt_len, field, strict=strict)

    async def _chat_ids(
        self, request: ChatCompletionRequest, model: ServedModel, owner: bytes
    ) -> list[int]:
        conversation = request.conversation
        if request.tool_use is not None and request.tool_use.tools:
            tools = [tool.as_template() for tool in request.tool_use.tools]
            conversation = replace(conversation, tools=tools)
        return await self.texts.chat_ids(model, conversation, owner)

    def may_call_tools(self, text: LoadedTokenizer) -> bool:
        """Return whether the model's template shows tools, and its calls are parsed."""
        family, _ = self.parsers.families(text.tool_parser, "")
        return bool(text.tool_parser) and family is not None

    def may_reason(self, text: LoadedTokenizer) -> bool:
        """Return whether reasoning in the model's answers is parsed."""
        _, family = self.parsers.families("", text.reasoning_parser)
        return family is not None

    def _families(self, model: ServedModel) -> Families:
        return self.parsers.families(model.text.tool_parser, model.text.reasoning_parser)

    def _shape(
        self, request: ChatCompletionRequest, model: ServedModel, ids: Sequence[int]
    ) -> tuple[RequestedSampling, AnswerFormat]:
        """Return the sampling with the constraints of the tools, and how the answer is parsed."""
        families = self._families(model)
        end = prompt_end(model.text.vocabulary, ids)
        if request.continues:
            end = final_text(request.conversation)
        form = answer_format(
            families,
            request.tool_use,
            end,
            continues=request.continues,
            inline=not request.separate_reasoning,
            structured=request.sampling.structure is not None,
        )
        with client_errors():
            sampling = shaped(
                request.sampling, families, request.tool_use, end, continues=request.continues
            )
        return sampling, form

    async def _prompts(
        self, request: TextCompletionRequest, model: ServedModel, owner: bytes
    ) -> list[Prompt]:
        choices = len(request.prompts) * (request.sampling.best_of or request.sampling.n)
        if choices > MAX_TOTAL_CHOICES:
            raise refuse(
                "n", f"{choices} choices in total; at most {MAX_TOTAL_CHOICES} are allowed"
            )
        prompts, field = [], request.prompt_field
        for prompt in request.prompts:
            if isinstance(prompt, str):
                text = prompt
                all_ids = await self.texts.text_ids(
                    model, prompt, field, owner, add_special_tokens=request.add_special_tokens
                )
                ids = _truncated(all_ids, request.kept_tokens, request.sampling, model)
                if len(ids) < len(all_ids):
                    text = await self._echo_text(request, model, ids, owner)
            else:
                ids = _truncated(prompt, request.kept_tokens, request.sampling, model)
                check_room(len(ids), 1, model, field)
                text = await self._echo_text(request, model, ids, owner)
            params = self._params(request.sampling, model, len(ids), field)
            prompts.append(Prompt(ids, text, params))
        return prompts

    async def _echo_text(
        self, request: TextCompletionRequest, model: ServedModel, ids: Sequence[int], owner: bytes
    ) -> str:
        field = request.prompt_field
        if request.echo:
            return await self.texts.decode(model, ids, field, owner, skip_special=False)
        check_ids(ids, model, field)
        return ""


def _truncated(
    ids: Sequence[int], kept_tokens: int | None, sampling: RequestedSampling, model: ServedModel
) -> Sequence[int]:
    """Apply `kept_ids`, leaving room for the requested answer, at most half of the context."""
    context_len = model.card.context_len
    answer_tokens = min(sampling.max_tokens or 1, context_len // 2)
    return kept_ids(ids, kept_tokens, model, context_len - answer_tokens)


def not_supported(api: str) -> ServiceError:
    """Return the error for a model of another kind, in vLLM's words."""
    return refuse("model", f"The model does not support {api} API")


def _check_generates(model: ServedModel, api: str) -> None:
    if model.card.pooling or model.card.score_token_ids:
        raise not_supported(api)
