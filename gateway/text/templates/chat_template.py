"""A chat template turns messages into a prompt, by the model's own jinja2 source.

The template is the model's, the messages are a client's: what a client wrote reaches the template
guarded (special.py), so that no message can end its turn or begin another's.

jinja2's sandbox keeps a template from Python. It does not bound what a template computes: whoever
renders one of a stranger does it in a process with limits (gateway/text_processes).
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.messages import TemplateInput, normalized, with_text_arguments
from pdserve.gateway.text.special import unused_mark
from pdserve.gateway.text.templates.described_tools import (
    described,
    in_system_turn,
    in_user_turn,
    plain_turns,
)
from pdserve.gateway.text.tokenizer import Rendered, Tokenizer
from pdserve.gateway.text.tools import GENERIC, tool_family

MAX_SOURCE_CHARS = 1 << 18


class ChatTemplate:
    """A jinja2 template with the environment that Hugging Face transformers gives it.

    Threads may share it.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`source` may be empty: then only `render` fails. `now` is for `strftime_now`.

        Raises UnsupportedTokenizer for a template that does not parse.
        """
        self._source = source
        self._special = tokenizer.special
        self._template = _compiled(source, now) if source else None
        card = tokenizer.card
        tokens = {
            "bos_token": tokenizer.token_name(card.bos_id),
            "eos_token": tokenizer.token_name(card.eos_ids[0] if card.eos_ids else None),
        }
        self._tokens = {name: text for name, text in tokens.items() if text is not None}

    @property
    def shows_tools(self) -> bool:
        """Whether the template has a place for tools; otherwise `render` makes them text."""
        return "tools" in self._source

    def render(self, asked: TemplateInput) -> Rendered:
        """The prompt for a conversation. Raises TextError: for bad messages, and with what the
        template itself raises."""
        field = asked.messages_field
        if self._template is None:
            raise TextError("this model has no chat template; use completions", field)
        try:
            return self._render(self._template, asked)
        except jinja2.TemplateError as error:
            raise TextError(str(error.message or error), field) from None
        except (TextError, MemoryError):
            raise
        except RecursionError:
            raise TextError("the messages are nested too deeply", field) from None
        except Exception as error:  # whatever Python raises for values the template did not expect
            raise TextError(f"the chat template fails on them: {error}", field) from None

    def _render(self, template: jinja2.Template, asked: TemplateInput) -> Rendered:
        messages = normalized(
            asked.messages,
            knows_developer="developer" in self._source,
            knows_null=" is none" in self._source or " is not none" in self._source,
            field=asked.messages_field,
        )
        if not self.shows_tools and (asked.tools or "tool_calls" not in self._source):
            return self._with_plain_tools(template, asked, messages)
        try:
            return self._filled(template, asked, messages)
        except TypeError:
            if not any("tool_calls" in message for message in messages):
                raise
        # DeepSeek's templates write arguments as the text that the model has written.
        return self._filled(template, asked, with_text_arguments(messages))

    def _with_plain_tools(
        self, template: jinja2.Template, asked: TemplateInput, messages: list[dict[str, Any]]
    ) -> Rendered:
        """Tools, calls and results as text: the tools in the system's turn, or in the user's if the
        template has none."""
        family = tool_family(asked.tool_parser or GENERIC)
        assert family is not None  # the gateway's settings name only those that there are
        turns = plain_turns(messages, family.form)
        plain = replace(asked, tools=None)
        if not asked.tools:
            return self._filled(template, plain, turns)
        text = described(asked.tools, family.form)
        with suppress(jinja2.TemplateError):
            rendered = self._filled(template, plain, in_system_turn(turns, text))
            if text in rendered.text:
                return rendered
        return self._filled(template, plain, in_user_turn(turns, text))

    def _filled(
        self, template: jinja2.Template, asked: TemplateInput, messages: list[dict[str, Any]]
    ) -> Rendered:
        variables = {**asked.variables, "messages": messages}
        variables["tools"] = list(asked.tools) if asked.tools else None
        mark = unused_mark(self._source, *_texts(variables))
        values = self._special.guard_all(variables, mark)
        end = ""
        if asked.continue_final_message:
            end = unused_mark(self._source, mark, *_texts(variables))
            values["messages"][-1]["content"] += end
        marked = template.render(
            {**values, **self._tokens, "add_generation_prompt": asked.add_generation_prompt}
        )
        if end:
            marked, found, _ = marked.rpartition(end)
            if not found:
                text = "the chat template leaves the last message out"
                raise TextError(text, "continue_final_message")
        return Rendered(marked, mark)


def _compiled(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise UnsupportedTokenizer(
            f"the chat template is longer than {MAX_SOURCE_CHARS} characters"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        optimized=False,  # constants are computed when they are rendered, not here
        finalize=_unchanged,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedTokenizer(f"chat template, line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError) as error:  # too deep for jinja, or for Python's compiler
        raise UnsupportedTokenizer(f"the chat template cannot be compiled: {error}") from None


@jinja2.pass_context
def _unchanged(context: Context, value: Any) -> Any:
    """Since it takes the context, jinja2 does not compute an output when it compiles."""
    return value


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it says nothing."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # HTML is not escaped, unlike jinja's own filter: models were trained on plain JSON.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _texts(value: Any) -> list[str]:
    """Returns every text in JSON data, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []
