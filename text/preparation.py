"""From a client's request to the parameters and the format of its answer, for every API; pure.

Tokenizing and compiling grammars come between the steps and are the caller's work: a gateway does
them in processes that it can kill, the Python API in its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pdserve.engine.api import ClientParams, Grammar, Range, SamplingParams, ThinkingBudget
from pdserve.text.answer_format import (
    AnswerFormat,
    Families,
    ParserChoice,
    answer_format,
    prompt_end,
    thinking_bound,
    with_structure,
)
from pdserve.text.constraints import Constraints
from pdserve.text.errors import TextError
from pdserve.text.generation_config import GenerationDefaults
from pdserve.text.messages import TemplateInput, final_text
from pdserve.text.request import ChatCompletionRequest, RequestedSampling, TextCompletionRequest
from pdserve.text.sampling import ID_LISTS, ModelLimits, check_range, context_overflow, listed
from pdserve.text.tokenizer import Vocabulary

ClientRequest = ChatCompletionRequest | TextCompletionRequest
_ENGINE_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class Preparation:
    """The steps of preparing a request for one model, called in the order of the methods from
    `check_model_bounds` on. Each raises TextError for a fault of the client.

    `defaults`: sampling parameters for requests that do not set them, from the model's authors or
    the operator. `tool_parser`, `reasoning_parser`: the families of the model's template, empty if
    it has none. `strict`: refuse a max_tokens beyond the context instead of cutting it.
    `max_new_tokens`: the operator's maximum of max_tokens; None: no maximum.
    """

    limits: ModelLimits
    vocabulary: Vocabulary
    defaults: GenerationDefaults
    parsers: ParserChoice
    tool_parser: str
    reasoning_parser: str
    strict: bool = False
    max_new_tokens: int | None = None

    @property
    def families(self) -> Families:
        """Return the families that parse the model's tool calls and reasoning; None for neither."""
        return self.parsers.families(self.tool_parser, self.reasoning_parser)

    def sampling_defaults(self, requested: RequestedSampling) -> dict[str, Any]:
        """Return the sampling parameters that a model may recommend, as the engine takes them: the
        client's values, else the defaults, else the engine's."""
        values: dict[str, Any] = {}
        for name in (item.name for item in fields(self.defaults) if item.name != "max_tokens"):
            sources = (requested, self.defaults, _ENGINE_DEFAULTS)
            candidates = (getattr(source, name) for source in sources)
            values[name] = next(value for value in candidates if value is not None)
        if values["top_p"] == 0:  # only the best token, which is top_k 1 for the engine
            values |= {"top_p": 1.0, "top_k": 1}
        values["top_k"] = min(max(values["top_k"], 0), self.limits.vocab_size)
        return values

    def max_tokens(self, requested: RequestedSampling) -> int | None:
        """Return how many tokens an answer may have; None: all that fit into the context. A
        recommended max_tokens gives way to a larger min_tokens of the client."""
        limit = requested.max_tokens
        if limit is None and self.defaults.max_tokens is not None:
            limit = max(self.defaults.max_tokens, requested.min_tokens)
        limits = (limit, self.max_new_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    def check_model_bounds(self, requested: RequestedSampling) -> None:
        """Check the bounds that depend on the model: token ids lie in its vocabulary, and
        min_tokens in its context. `check_sampling` (text/sampling.py) checks the others."""
        check_range("min_tokens", requested.min_tokens, Range(0, self.limits.context_len))
        vocab_size = self.limits.vocab_size
        for name in ("logit_bias", *ID_LISTS):
            invalid_ids = [id_ for id_ in getattr(requested, name) if not 0 <= id_ < vocab_size]
            if invalid_ids:
                text = f"{name} must have token ids from 0 to {vocab_size - 1}"
                raise TextError(f"{text}, not {listed(invalid_ids)}", name)

    def conversation(self, request: ChatCompletionRequest) -> TemplateInput:
        """Return a chat's conversation as its template takes it: with the tools, and with the
        parser of calls for templates with no place for tools or calls."""
        conversation = request.conversation
        if request.tool_use is not None and request.tool_use.tools:
            tools = [tool.as_template() for tool in request.tool_use.tools]
            conversation = replace(conversation, tools=tools)
        family, _ = self.families
        if family is not None:
            return replace(conversation, tool_parser=family.name)
        if conversation.tools and not self.tool_parser:
            text = "the model's chat template does not support tools, and no parser of tool calls"
            raise TextError(f"{text} is selected (see tool_parser)", "tools")
        return conversation

    def check_prompt(self, request: ClientRequest, ids: Sequence[int]) -> None:
        """Check that a prompt has tokens and leaves room for the answer: for a token, for
        min_tokens, and if `strict` for max_tokens."""
        param, sampling, prompt_len = request.prompt_field, request.sampling, len(ids)
        room = self.limits.context_len - prompt_len
        requested, cap = sampling.max_tokens, self.max_new_tokens
        max_tokens = self.max_tokens(sampling)
        if not ids:
            raise TextError("the prompt has no tokens", param)
        if room <= 0:
            raise context_overflow(self.limits, prompt_len, param, requested)
        if max_tokens is None:
            max_tokens = room
        if self.strict and requested is not None and max_tokens > room:
            field = sampling.max_tokens_field
            raise context_overflow(self.limits, prompt_len, param, requested, field)
        limit = min(max_tokens, room)
        if sampling.min_tokens > limit:
            of_server = limit == cap and (requested is None or requested > cap)
            allowed = f"{limit}, this server's maximum" if of_server else f"max_tokens ({limit})"
            raise TextError(f"min_tokens must be at most {allowed}", "min_tokens")

    def format(
        self, request: ClientRequest, ids: Sequence[int]
    ) -> tuple[RequestedSampling, AnswerFormat]:
        """Return the sampling with the constraints that tools and reasoning add, and how the answer
        is parsed. `ids`: the prompt of a chat; not used for a text completion."""
        families = self.families
        if isinstance(request, TextCompletionRequest):
            return thinking_bound(request.sampling, families[1]), AnswerFormat()
        continues, use = request.continues, request.tool_use
        end = final_text(request.conversation) if continues else prompt_end(self.vocabulary, ids)
        form = answer_format(
            families,
            use,
            end,
            continues=continues,
            inline=not request.separate_reasoning,
            structured=request.sampling.structure is not None,
        )
        return with_structure(request.sampling, families, use, end, continues=continues), form

    def params(
        self,
        request: ClientRequest,
        sampling: RequestedSampling,
        constraints: Constraints,
        ids: Sequence[int],
    ) -> SamplingParams:
        """Return the engine's parameters for one prompt that `check_prompt` has accepted.
        `sampling`: the result of `format`.

        Without a max_tokens of the client or the model, or with one beyond the context, the
        engine's max_tokens is None, which requests all room: only the engine knows how much n
        choices have.
        """
        r, context_len, prompt_len = sampling, self.limits.context_len, len(ids)
        values: dict[str, Any] = {item.name: getattr(r, item.name) for item in fields(ClientParams)}
        values |= self.sampling_defaults(r)
        repeats = values["repetition_penalty"] != 1
        penalizes = repeats or r.presence_penalty or r.frequency_penalty
        values["penalty_window"] = min(r.penalty_window, context_len) if penalizes else 0
        values["n"] = r.best_of or r.n
        max_tokens = self.max_tokens(r)
        fits = max_tokens is not None and max_tokens <= context_len - prompt_len
        values["max_tokens"] = max_tokens if fits else None
        if r.logprobs is None and values["n"] > r.n:
            values["logprobs"] = 0  # to rank the candidates
        if prompt_len == 1:  # a prompt's first token has no log-probability
            values["prompt_logprobs"] = None
        values |= {name: tuple(values[name]) for name in ID_LISTS}
        c = constraints.of_prompt(ids, self.vocabulary, continues=request.continues)
        if c.grammar:
            values["grammar"] = Grammar(c.grammar, c.grammar_after)
        if (budget := c.thinking_budget) is not None:
            values["thinking"] = ThinkingBudget(budget, c.thinking_end, c.thinking_start)
        return SamplingParams(**values, bad_words=c.bad_words)
