"""From a client's request to the parameters and the format of its answer, for every API; pure.

Tokenizing and compiling grammars come between the steps and are the caller's work: a gateway does
them in processes that it can kill, the Python API in its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.engine.api import SamplingParams
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
from pdserve.text.sampling import ModelLimits, check_for, check_prompt_len, resolve
from pdserve.text.tokenizer import Vocabulary

ClientRequest = ChatCompletionRequest | TextCompletionRequest


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
        check_for(self.limits, requested)

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
        check_prompt_len(self.limits, request.sampling, len(ids), request.prompt_field)

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
        """Return the engine's parameters for one prompt. `sampling`: of `format`."""
        return resolve(
            sampling,
            self.limits,
            self.defaults,
            constraints.of_prompt(ids, self.vocabulary, continues=request.continues),
            len(ids),
            request.prompt_field,
            strict=self.strict,
        )
