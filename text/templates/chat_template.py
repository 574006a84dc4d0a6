"""Renders the messages of a conversation to a prompt with the model's jinja2 chat template.

Invariant: only text that the template itself writes can become special tokens, never text from the
client (template_text.py). So a message cannot end its turn or begin another one. Which messages a
template can render is probed (capabilities.py), and messages are adapted to that (turns.py).

This module does not limit a template's computation: untrusted templates are rendered in a process
with limits (text/workers).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Any

import jinja2

from pdserve.text.errors import TextError
from pdserve.text.messages import EFFORTS, TemplateInput, normalized
from pdserve.text.parsing import CallForm
from pdserve.text.template_text import CLIENT, LAST, TemplateText, constant, origin_of
from pdserve.text.templates.alternatives import Conversation, alternatives
from pdserve.text.templates.capabilities import RESULT_ROLES, Capabilities, probe_template
from pdserve.text.templates.environment import compile_template
from pdserve.text.templates.turns import (
    in_system_turn,
    shaped,
    text_of,
    tools_description,
    with_calls_apart,
    with_known_systems,
    with_named_results,
    with_plain_tools,
    with_single_calls,
    with_texts,
)
from pdserve.text.tokenizer.tokenizer import Rendered, Tokenizer
from pdserve.text.tool_parsers import GENERIC_PARSER, tool_family

log = logging.getLogger(__name__)

# Client words that may become part of a special token, as in <|user|>.
_WORDS = {
    word: constant(word)
    for word in ("system", "developer", "user", "assistant", *RESULT_ROLES, *EFFORTS)
}

MAX_NAMES = 8  # of special tokens in one log line
_END = "\u2026"  # placeholder for an empty last message, only while rendering


class _Refusal(TextError):
    """The template fails on a conversation; a rewritten form of the conversation may succeed."""


class ChatTemplate:
    """A chat template, compiled with the environment that Hugging Face transformers provides.
    Threads may share it."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template `source`; if it is empty, the model has no template and `render`
        raises TextError. `now`: the clock of the template's function `strftime_now`. Raises
        UnsupportedTokenizer if the template does not compile."""
        self._template = compile_template(source, now) if source else None
        self._capabilities: Capabilities | None = None
        self._tokenizer = tokenizer
        model_info = tokenizer.model_info
        tokens = {
            "bos_token": tokenizer.token_name(model_info.bos_id),
            "eos_token": tokenizer.token_name(
                model_info.eos_ids[0] if model_info.eos_ids else None
            ),
        }
        self._tokens = {name: constant(text) for name, text in tokens.items() if text is not None}

    @property
    def capabilities(self) -> Capabilities:
        """What the template can render; probed on first use, unless it was set before."""
        if self._capabilities is None:
            computed_tokens: set[int] = set()
            self._capabilities = probe_template(
                lambda messages, tools: self._probe(messages, tools, computed_tokens),
                lambda messages, tools, effort: self._probe(
                    messages, tools, computed_tokens, reasoning_effort=effort
                ),
            )
            if computed_tokens:
                names = [
                    self._tokenizer.token_name(token)
                    for token in sorted(computed_tokens)[:MAX_NAMES]
                ]
                log.warning(
                    "prompts have these special tokens as plain text, since the chat template "
                    "computes them instead of containing them: %s",
                    ", ".join(map(repr, names)),
                )
        return self._capabilities

    @capabilities.setter
    def capabilities(self, value: Capabilities) -> None:
        self._capabilities = value

    @property
    def shows_tools(self) -> bool:
        """Whether the template can show tools; if not, `render` describes them to the model as
        plain text."""
        return self._template is not None and self.capabilities.tools

    def render(self, request: TemplateInput) -> Rendered:
        """Render a conversation to the model's prompt. Raises TextError if the messages are invalid
        or the template fails on them."""
        field = request.messages_field
        if self._template is None:
            raise TextError("this model has no chat template", field)
        messages = normalized(request.messages, field)
        capabilities = self.capabilities
        tools = request.tools or None
        if capabilities.named_results:
            messages = with_named_results(messages)
        uses_tools = any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if tools and not capabilities.tools:
            form = _form(request)
            turns = with_plain_tools(with_texts(messages), form)
            messages, tools = in_system_turn(turns, tools_description(tools, form)), None
        elif uses_tools and not (capabilities.calls and capabilities.results):
            messages = with_plain_tools(
                with_texts(messages),
                _form(request),
                calls=not capabilities.calls,
                results=not (capabilities.tools and capabilities.results),
            )
        elif uses_tools:
            if not capabilities.parallel_calls:
                messages = with_single_calls(messages)
            if not capabilities.text_beside_calls:
                messages = with_calls_apart(messages)
        return self._rendered(request, Conversation(messages, tools))

    def _rendered(self, request: TemplateInput, conversation: Conversation) -> Rendered:
        """Render a conversation; if the template fails on it, render the equivalent conversation
        with the fewest changes on which it succeeds. If it fails even on those with the most
        changes, raise the TextError of the original conversation."""
        try:
            return self._render_once(request, conversation)
        except _Refusal:
            *smaller_changes, largest_changes = alternatives(conversation) or [[]]
            fallback = self._first_rendered(request, largest_changes)
            if fallback is None:
                raise
        return self._first_rendered(request, chain.from_iterable(smaller_changes)) or fallback

    def _first_rendered(
        self, request: TemplateInput, conversations: Iterable[Conversation]
    ) -> Rendered | None:
        """Render the first of several conversations on which the template succeeds; None if it
        fails on all. Raises TextError for an error that is not a failure of the template."""
        for conversation in conversations:
            with suppress(_Refusal):
                return self._render_once(request, conversation)
        return None

    def _render_once(self, request: TemplateInput, conversation: Conversation) -> Rendered:
        """Render one conversation without trying rewritten forms. Raises _Refusal if the template
        fails, or another TextError."""
        field = request.messages_field
        capabilities = self.capabilities
        turns = with_known_systems(
            conversation.messages, capabilities.systems, developer=capabilities.developer
        )
        last_text = text_of(turns[-1])
        if request.continue_final_message:
            turns[-1]["content"] = _with_end(last_text)
        messages = [shaped(turn, capabilities) for turn in turns]
        try:
            text = self._text(
                messages,
                conversation.tools,
                **self._variables(request),
                add_generation_prompt=request.add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise _Refusal(str(error.message or error), field) from None
        except MemoryError:
            raise
        except RecursionError:
            raise _Refusal(
                "the messages are nested too deeply for the chat template", field
            ) from None
        except Exception as error:  # any Python error for values that the template does not expect
            raise _Refusal(
                f"the chat template cannot render the messages: {error}", field
            ) from None
        if request.continue_final_message:
            return _until_end(text, last_text)
        return _plain(text)

    def _variables(self, request: TemplateInput) -> dict[str, Any]:
        """Return the variables that a request passes to the template; a suggested reasoning effort
        is replaced by the nearest that the template accepts."""
        suggested = dict(request.suggested)
        effort = suggested.pop("reasoning_effort", None)
        if (
            effort is not None
            and (accepted := self.capabilities.nearest_effort(effort)) is not None
        ):
            suggested["reasoning_effort"] = accepted
        return {**suggested, **request.variables}

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> TemplateText:
        """Run the template with messages and tools in their final form. Raises any exception of the
        template."""
        assert self._template is not None
        values = {
            **variables,
            "messages": [{**m, "role": _WORDS.get(m["role"], m["role"])} for m in messages],
            "tools": None if tools is None else list(tools),
            "documents": None,
            **self._tokens,
        }
        effort = values.get("reasoning_effort")
        if isinstance(effort, str):
            values["reasoning_effort"] = _WORDS.get(effort, effort)
        rendered = self._template.render(values)
        assert isinstance(rendered, TemplateText)  # the environment's `concat` returns one
        return rendered

    def _probe(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        computed_tokens: set[int],
        **variables: Any,
    ) -> str | None:
        """Render a test conversation; return None if the template fails on it. Adds special tokens
        to `computed_tokens` that the text contains but that are not known to come from the template
        itself."""
        try:
            rendered = _plain(self._text(messages, tools, **variables, add_generation_prompt=True))
        except Exception:
            return None
        split = self._tokenizer.special.split
        template_parts = split(rendered.text, rendered.origin)
        computed_tokens.update(_tokens(split(rendered.text)) - _tokens(template_parts))
        return rendered.text


def _form(request: TemplateInput) -> CallForm:
    """Return the form in which a model writes a call as text if its template cannot show tools."""
    family = tool_family(request.tool_parser or GENERIC_PARSER)
    assert family is not None  # the gateway's settings allow only existing parsers
    return family.form


def _tokens(parts: Sequence[str | int]) -> Counter[int]:
    return Counter(part for part in parts if isinstance(part, int))


def _with_end(content: str) -> TemplateText:
    """Mark the end of the last message's content: its last visible character gets the origin LAST.
    An empty content gets a placeholder instead."""
    length = len(content.rstrip())
    if not length:  # the placeholder keeps templates from dropping an empty turn
        return TemplateText(content + _END, CLIENT * len(content) + LAST)
    rest = CLIENT * (len(content) - length)
    return TemplateText(content, CLIENT * (length - 1) + LAST + rest)


def _until_end(text: TemplateText, content: str) -> Rendered:
    """Cut a rendered prompt at the end of its last message, so that the model continues the
    message. Raises TextError if the template dropped the message."""
    end = origin_of(text).rfind(LAST)
    if end < 0:
        raise TextError(
            "the chat template omits the last message, so it cannot be continued",
            "continue_final_message",
        )
    is_blank = not content.strip()
    end += not is_blank
    rest = "" if is_blank else content[len(content.rstrip()) :]
    return _plain(text[:end] + rest)


def _plain(text: TemplateText) -> Rendered:
    return Rendered("".join((text,)), origin_of(text))
