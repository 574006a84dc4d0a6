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
    shaped,
    thinking_bound,
)
from pdserve.text.constraints import Constraints
from pdserve.text.errors import TextError
from pdserve.text.generation_config import GenerationDefaults
from pdserve.text.messages import TemplateInput, final_text
from pdserve.text.request import ChatCompletionRequest, RequestedSampling, TextCompletionRequest
from pdserve.text.sampling import ModelLimits, check_range, context_overflow, listed
from pdserve.text.tokenizer import Vocabulary

ClientRequest = ChatCompletionRequest | TextCompletionRequest
_IDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


@dataclass(frozen=True, slots=True)
class Preparation:
    """The steps for one model, in the order of the methods; all raise TextError.

    `tool_parser`, `reasoning_parser`: the families of the model's template, empty if it has none.
    `strict`: refuse a max_tokens beyond the context.
    """

    limits: ModelLimits
    vocabulary: Vocabulary
    defaults: GenerationDefaults
    parsers: ParserChoice
    tool_parser: str
    reasoning_parser: str
    strict: bool = False

    @property
    def families(self) -> Families:
        return self.parsers.families(self.tool_parser, self.reasoning_parser)

    def check(self, requested: RequestedSampling) -> None:
        """Check the bounds that depend on the model; `sampling.check` has checked the others."""
        check_range("min_tokens", requested.min_tokens, Range(0, self.limits.context_len))
        vocab_size = self.limits.vocab_size
        for name in ("logit_bias", *_IDS):
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
            raise TextError(f"{text} is selected (see --tool-parser)", "tools")
        return conversation

    def check_prompt(self, request: ClientRequest, ids: Sequence[int]) -> None:
        """Check that a prompt has tokens and leaves room for an answer."""
        param = request.prompt_field
        if not ids:
            raise TextError("the prompt has no tokens", param)
        if len(ids) >= self.limits.context_len:
            raise context_overflow(self.limits, len(ids), param, request.sampling.max_tokens)

    def format(
        self, request: ClientRequest, ids: Sequence[int]
    ) -> tuple[RequestedSampling, AnswerFormat]:
        """Return the sampling with the constraints of tools and reasoning, and how the answer is
        read. `ids`: of a chat's prompt."""
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
        return shaped(request.sampling, families, use, end, continues=continues), form

    def params(
        self,
        request: ClientRequest,
        sampling: RequestedSampling,
        constraints: Constraints,
        ids: Sequence[int],
    ) -> SamplingParams:
        """Return the engine's parameters for one prompt; `sampling` is that of `format`.

        Without a max_tokens, or with one beyond the context, the engine's max_tokens is None, which
        requests all room: only the engine knows how much n choices have.
        """
        r, context_len, prompt_len = sampling, self.limits.context_len, len(ids)
        room = context_len - prompt_len
        max_tokens = room if r.max_tokens is None else r.max_tokens
        if max_tokens > room and self.strict:
            field = request.prompt_field
            raise context_overflow(self.limits, prompt_len, field, max_tokens, r.max_tokens_field)
        if r.min_tokens > min(max_tokens, room):
            text = f"min_tokens must be at most max_tokens ({min(max_tokens, room)})"
            raise TextError(text, "min_tokens")
        values: dict[str, Any] = {item.name: getattr(r, item.name) for item in fields(ClientParams)}
        for name in (item.name for item in fields(self.defaults)):
            if values[name] is None:  # the model's value; None: the engine's
                values[name] = getattr(self.defaults, name)
        if values["top_p"] == 0:  # only the best token, which is top_k 1 for the engine
            values |= {"top_p": 1.0, "top_k": 1}
        if values["top_k"] is not None:
            values["top_k"] = min(max(values["top_k"], 0), self.limits.vocab_size)
        repeats = values["repetition_penalty"] not in (None, 1)
        penalizes = repeats or r.presence_penalty or r.frequency_penalty
        values["penalty_window"] = min(r.penalty_window, context_len) if penalizes else 0
        values["n"] = r.best_of or r.n
        if max_tokens > room:
            values["max_tokens"] = None
        if r.logprobs is None and values["n"] > r.n:
            values["logprobs"] = 0  # to rank the candidates
        if prompt_len == 1:  # a prompt's first token has no log-probability
            values["prompt_logprobs"] = None
        values |= {name: tuple(values[name]) for name in _IDS}
        c = constraints.of_prompt(ids, self.vocabulary, continues=request.continues)
        if c.grammar:
            values["grammar"] = Grammar(c.grammar, c.grammar_after)
        if (budget := c.thinking_budget) is not None:
            values["thinking"] = ThinkingBudget(budget, c.thinking_end, c.thinking_start)
        set_values = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**set_values, bad_words=c.bad_words)
