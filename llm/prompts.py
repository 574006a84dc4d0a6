"""Convert prompts, messages and params of the Python API to engine requests; thread-safe.

The gateway does the same with the same parts, in tokenizer workers. Here, chat templates and
structures run in this process, without the limits of the tokenizer workers.
"""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.engine.api import Grammar, InvalidRequest, Request, ThinkingBudget
from pdserve.engine.api import SamplingParams as EngineParams
from pdserve.engine.checkpoints import CardData
from pdserve.llm.chat import ChatInput
from pdserve.llm.generation import PreparedRequest
from pdserve.llm.sampling import SamplingParams, check_ids
from pdserve.text import (
    Constraints,
    GenerationDefaults,
    ParserChoice,
    RequestedSampling,
    Structure,
    TemplateInput,
    TextError,
    check_structure,
    constraints_of,
    final_text,
    prompt_end,
    shaped,
    texts_of,
    thinking_bound,
)
from pdserve.text.answer_format import answer_format
from pdserve.text.reasoning import reasoning_family_of, reasoning_parser_names
from pdserve.text.structured_output import StructureCache
from pdserve.text.templates import ChatTemplate
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Rendered, Tokenizer
from pdserve.text.tool_parsers import tool_family_of, tool_parser_names

if TYPE_CHECKING:
    from pdserve.text.structured_output.compiler import GrammarCompiler

Prompt = str | Sequence[int]
T = TypeVar("T")
POOLS = EngineParams()  # params of an embedding request; also the engine's defaults


class PromptMaker:
    """Build the engine requests of one model."""

    def __init__(self, card: CardData, parsers: ParserChoice) -> None:
        """Load the tokenizer and chat template. Raises ValueError for an unknown parser."""
        _check_parser("tool_parser", parsers.tools, tool_parser_names())
        _check_parser("reasoning_parser", parsers.reasoning, reasoning_parser_names())
        model_info = TextModelInfo(card.vocab_size, card.eos_ids, card.bos_id, card.adds_bos)
        self.tokenizer = Tokenizer(card.tokenizer_json, model_info)
        self._template = ChatTemplate(card.chat_template, self.tokenizer)
        self._shows_tools = self._template.shows_tools
        self._parsers = parsers
        self._families = parsers.families(
            tool_family_of(card.chat_template) if self._shows_tools else "",
            reasoning_family_of(card.chat_template) if card.chat_template else "",
        )
        self._defaults = GenerationDefaults.from_json(json.dumps(card.generation_config))
        self._lock = threading.Lock()  # guards _compiler and _compiled
        self._compiler: GrammarCompiler | None = None
        self._compiled = StructureCache()

    def default_params(self) -> SamplingParams:
        """Return the params that the model recommends; the engine's defaults for the others."""
        return SamplingParams(**self._recommended(SamplingParams()))

    def text(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> PreparedRequest:
        """Build the request of a prompt. Raises InvalidRequest, TypeError for a non-prompt."""
        _check_params(params)
        sampling_params = params or SamplingParams()
        with invalid_requests():
            sampling = thinking_bound(sampling_params.requested(), self._families[1])
            ids = self.encode(prompt)
            request = self._request(ids, sampling_params, sampling, priority, continues=True)
        return PreparedRequest(request, prompt if isinstance(prompt, str) else None, sampling)

    def chat(
        self, chat: ChatInput, params: SamplingParams | None, priority: int
    ) -> PreparedRequest:
        """Build the request of a chat. Raises InvalidRequest, TypeError for a non-conversation."""
        _check_params(params)
        sampling_params = params or SamplingParams()
        with invalid_requests():
            conversation, rendered = self._rendered(chat)
            ids = self.tokenizer.encode_rendered(rendered)
            continues = chat.continue_final_message
            end = final_text(conversation) if continues else prompt_end(self.tokenizer, ids)
            format = answer_format(
                self._families,
                chat.use,
                end,
                continues=continues,
                inline=False,
                structured=sampling_params.structured_outputs is not None,
            )
            sampling = shaped(
                sampling_params.requested(), self._families, chat.use, end, continues=continues
            )
            request = self._request(ids, sampling_params, sampling, priority, continues=continues)
        return PreparedRequest(request, rendered.text, sampling, format, continues)

    def embedding(self, prompt: Prompt) -> Request:
        """Build an embedding request. Raises InvalidRequest, TypeError for a non-prompt."""
        with invalid_requests():
            return Request("", tuple(self.encode(prompt)), POOLS, 0, pool=True)

    def rendered(self, chat: ChatInput) -> str:
        """Return the prompt of a conversation as text. Raises like `chat`."""
        with invalid_requests():
            return self._rendered(chat)[1].text

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises TextError, TypeError, InvalidRequest."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True, parse_special=True)
        ids: Any = prompt
        if isinstance(ids, bytes) or not isinstance(ids, Sequence):
            kind = type(ids).__name__
            raise TypeError(f"a prompt must be a string or a list of token ids, not {kind}")
        check_ids(ids, "prompt")
        return list(ids)

    def _rendered(self, chat: ChatInput) -> tuple[TemplateInput, Rendered]:
        if not isinstance(chat.messages, Sequence) or not all(
            isinstance(message, Mapping) for message in chat.messages
        ):
            raise TypeError('a conversation must be a list of messages, {"role", "content"}')
        tools, plain_family = None, ""
        if chat.use is not None:
            tools = [tool.as_template() for tool in chat.use.tools]
        if not self._shows_tools:
            family, _ = self._parsers.families("", "")
            if family is None and tools:
                raise TextError(
                    "the model's chat template does not support tools, and tool_parser "
                    "selects no parser",
                    "tools",
                )
            plain_family = family.name if family is not None else ""
        conversation = TemplateInput(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=chat.variables,
            tools=tools,
            tool_parser=plain_family,
        )
        return conversation, self._template.render(conversation)

    def _request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        sampling: RequestedSampling,
        priority: int,
        *,
        continues: bool,
    ) -> Request:
        if not isinstance(priority, Integral) or isinstance(priority, bool):
            text = f"priority must be a whole number, not {priority!r:.60}"
            raise InvalidRequest(text, "priority")
        constraints = self._constraints(sampling)
        constraints = constraints.of_prompt(ids, self.tokenizer, continues=continues)
        grammar = (
            Grammar(constraints.grammar, constraints.grammar_after) if constraints.grammar else None
        )
        thinking = None
        if constraints.thinking_budget is not None:
            thinking = ThinkingBudget(
                constraints.thinking_budget, constraints.thinking_end, constraints.thinking_start
            )
        engine_params = EngineParams(
            **self._recommended(params),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            penalty_window=params.penalty_window,
            logit_bias=dict(params.logit_bias),
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
            max_tokens=params.max_tokens,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            n=params.n,
            allowed_token_ids=tuple(params.allowed_token_ids),
            bad_words=constraints.bad_words,
            grammar=grammar,
            thinking=thinking,
            logprob_token_ids=tuple(params.logprob_token_ids),
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**64
        return Request("", tuple(ids), engine_params, seed, priority=priority)

    def _recommended(self, params: SamplingParams) -> dict[str, Any]:
        """Return the params that a model may recommend: the user's value, else the model's, else
        the engine's."""
        values = {}
        for name in (param.name for param in fields(self._defaults)):
            user_value, recommended_value = getattr(params, name), getattr(self._defaults, name)
            value = recommended_value if user_value is None else user_value
            values[name] = getattr(POOLS, name) if value is None else value
        values["top_k"] = max(0, values["top_k"])
        return values

    def _constraints(self, sampling: RequestedSampling) -> Constraints:
        if not sampling.is_constrained:
            return Constraints()
        grammar = ""
        if sampling.structure is not None:
            check_structure(sampling, sampling.structure)
            grammar = self._grammar(sampling.structure)
        ids = {text: self.tokenizer.encode_within(text) for text in texts_of(sampling)}
        return constraints_of(sampling, ids, grammar, self.tokenizer)

    def _grammar(self, structure: Structure) -> str:
        """Return the grammar source of a structure; results are cached. Raises TextError."""
        key = hashlib.sha256(structure.encoded()).digest()
        with self._lock:
            compiled = self._compiled.get(key, time.monotonic())
            if compiled is None:
                try:
                    compiled = self._grammars(structure).compile(structure)
                except TextError as error:
                    compiled = error
                self._compiled.put(key, compiled)
        if isinstance(compiled, TextError):
            raise compiled
        return compiled

    def _grammars(self, structure: Structure) -> "GrammarCompiler":
        if self._compiler is None:
            from pdserve.text.structured_output.compiler import GrammarCompiler  # slow to import

            try:
                self._compiler = GrammarCompiler(self.tokenizer)
            except ValueError as error:
                text = f"this model does not support structured outputs: {error}"
                raise TextError(text, structure.param) from None
        return self._compiler


@contextmanager
def invalid_requests() -> Iterator[None]:
    """Convert a TextError to InvalidRequest, the error that the engine raises as well."""
    try:
        yield
    except TextError as error:
        raise InvalidRequest(str(error), error.param) from None


def _check_params(params: object) -> None:
    if params is not None and not isinstance(params, SamplingParams):
        kind = type(params)
        name = f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"sampling_params must be pdserve.SamplingParams, not {name}")


def _check_parser(option: str, name: str, parser_names: Sequence[str]) -> None:
    names = ("auto", "none", *parser_names)
    if name not in names:
        raise ValueError(f"{option}: {name!r} is not one of {', '.join(names)}")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list; a single prompt (a text or a list of token ids) becomes a list of
    one. Values that are not prompts are not changed: `encode` rejects them."""
    value: Any = prompts
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return [value]
    if value and not isinstance(value[0], str | Sequence):
        return [value]
    return list(value)


def per_prompt(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """Return one value of the argument `name` per prompt. Raises ValueError for another count."""
    if not isinstance(value, list | tuple):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} prompts")
    return value
