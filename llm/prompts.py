"""Convert prompts, messages and params of the Python API to engine requests; thread-safe.

The steps are those of every API (text/preparation.py). Chat templates and the compiler of grammars
run in this process, without the limits of a gateway's tokenizer workers.
"""

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar, Unpack

from pdserve.engine.api import InvalidRequest, Request
from pdserve.engine.api import SamplingParams as EngineParams
from pdserve.engine.checkpoints import CardData
from pdserve.llm.chat import ChatOptions, chat_request
from pdserve.llm.generation import PreparedRequest
from pdserve.llm.outputs import Conversation
from pdserve.llm.sampling import SamplingParams, check_ids, invalid_requests, requested
from pdserve.text import (
    ChatCompletionRequest,
    ClientRequest,
    Constraints,
    ParserChoice,
    Preparation,
    RequestedSampling,
    Structure,
    TextCompletionRequest,
    TextError,
    check_structure,
    constraints_of,
    seed_of,
    texts_of,
)
from pdserve.text.model import TextModel
from pdserve.text.reasoning import reasoning_parser_names
from pdserve.text.structured_output import StructureCache
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Rendered, Tokenizer
from pdserve.text.tool_parsers import tool_parser_names

Prompt = str | Sequence[int]
T = TypeVar("T")


class PromptMaker:
    """Build the engine requests of one model."""

    def __init__(self, card: CardData, parsers: ParserChoice, template: bytes = b"") -> None:
        """Load the tokenizer and chat template. `template`: its source; empty: the model's. Raises
        ValueError for an unknown parser."""
        _check_parser("tool_parser", parsers.tools, tool_parser_names())
        _check_parser("reasoning_parser", parsers.reasoning, reasoning_parser_names())
        files = {
            "tokenizer": card.tokenizer_json,
            "template": template or card.chat_template.encode(),
            "generation": json.dumps(card.generation_config).encode(),
        }
        model_info = TextModelInfo(card.vocab_size, card.eos_ids, card.bos_id, card.adds_bos)
        self._text = text = TextModel(model_info, files)
        self._name = card.name
        self._scores_pairs = card.scores_pairs
        self._steps = Preparation(
            card, text.tokenizer, text.defaults, parsers, text.tool_parser, text.reasoning_parser
        )
        self._lock = threading.Lock()  # guards the grammar compiler and _compiled
        self._compiled = StructureCache()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def default_params(self) -> SamplingParams:
        """Return the params that the model recommends; the engine's defaults for the others."""
        requested = RequestedSampling()
        values = self._steps.sampling_defaults(requested)
        return SamplingParams(**values, max_tokens=self._steps.max_tokens(requested))

    def text(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> PreparedRequest:
        """Build the request of a prompt. Raises InvalidRequest, TypeError for a non-prompt."""
        sampling = requested(params)
        with invalid_requests():
            ids = self.encode(prompt)
            request = TextCompletionRequest("", (), sampling, priority=priority)
            return self._prepared(request, prompt if isinstance(prompt, str) else None, ids)

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        priority: int,
        **options: Unpack[ChatOptions],
    ) -> PreparedRequest:
        """Build the request of a chat. Raises InvalidRequest, TypeError for a non-conversation."""
        request = chat_request(messages, requested(params), priority, **options)
        with invalid_requests():
            rendered = self._rendered(request)
            ids = self.tokenizer.encode_rendered(rendered)
            return self._prepared(request, rendered.text, ids)

    def embedding(self, prompt: Prompt) -> Request:
        """Build an embedding request. Raises InvalidRequest, TypeError for a non-prompt."""
        if self._scores_pairs:
            raise InvalidRequest("The model scores pairs of texts; it does not embed", "model")
        with invalid_requests():
            return Request("", tuple(self.encode(prompt)), EngineParams(), 0, pool=True)

    def rendered(self, messages: Conversation, **options: Unpack[ChatOptions]) -> str:
        """Return the prompt of a conversation as text. Raises like `chat`."""
        request = chat_request(messages, requested(), **options)
        with invalid_requests():
            return self._rendered(request).text

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises TextError, TypeError, InvalidRequest."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True, parse_special=True)
        ids: Any = prompt
        if isinstance(ids, bytes) or not isinstance(ids, Sequence):
            kind = type(ids).__name__
            raise TypeError(f"a prompt must be a string or a list of token ids, not {kind}")
        check_ids(ids, "prompt")
        try:
            self.tokenizer.check_ids(ids)
        except TextError as error:
            raise TextError(str(error), "prompt") from None
        return list(ids)

    def _rendered(self, request: ChatCompletionRequest) -> Rendered:
        conversation = self._steps.conversation(request)
        if self._text.template is None:
            text = (
                f"the model {self._name!r} cannot chat: it is a base model, which has no chat "
                "template; use generate instead"
            )
            raise TextError(text, request.prompt_field)
        return self._text.template.render(conversation)

    def _prepared(
        self, request: ClientRequest, text: str | None, ids: Sequence[int]
    ) -> PreparedRequest:
        if not isinstance(request.priority, Integral) or isinstance(request.priority, bool):
            problem = f"priority must be a whole number, not {request.priority!r:.60}"
            raise InvalidRequest(problem, "priority")
        steps = self._steps
        steps.check_model_bounds(request.sampling)
        steps.check_prompt(request, ids)
        sampling, form = steps.format(request, ids)
        params = steps.params(request, sampling, self._constraints(sampling), ids)
        seed = seed_of(sampling)
        engine_request = Request("", tuple(ids), params, seed, priority=request.priority)
        return PreparedRequest(engine_request, text, sampling, form, request.continues)

    def _constraints(self, sampling: RequestedSampling) -> Constraints:
        if not sampling.is_constrained:
            return Constraints()
        structure = sampling.structure
        if structure is not None:
            check_structure(sampling, structure)
        ids = {text: self.tokenizer.encode_within(text) for text in texts_of(sampling)}
        # Check the rest first: compiling the grammar takes longest.
        constraints = constraints_of(sampling, ids, "", self.tokenizer)
        if structure is None:
            return constraints
        return replace(constraints, grammar=self._grammar(structure))

    def _grammar(self, structure: Structure) -> str:
        """Return the grammar source of a structure; results are cached. Raises TextError."""
        key = hashlib.sha256(structure.encoded()).digest()
        with self._lock:
            compiled = self._compiled.get(key, time.monotonic())
            if compiled is None:
                try:
                    compiled = self._text.grammar(structure)
                except TextError as error:
                    compiled = error
                self._compiled.put(key, compiled)
        if isinstance(compiled, TextError):
            raise compiled
        return compiled


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
