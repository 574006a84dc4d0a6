"""A chat template turns messages into a prompt, by the model's own jinja2 source.

The template is the model's, the messages are a client's: what a client wrote reaches the template
guarded (special.py), so that no message can end its turn or begin another's.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2

from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.messages import normalized
from pdserve.gateway.text.sandbox import BUDGET, BoundedEnvironment, Budget, RenderLimits
from pdserve.gateway.text.special import unused_mark
from pdserve.gateway.text.tokenizer import Rendered, Tokenizer

MAX_SOURCE_CHARS = 1 << 18


class ChatTemplate:
    """A jinja2 template with the environment that Hugging Face transformers gives it.

    Render on a worker thread: a large conversation takes milliseconds, a hostile template up to
    the limits. Threads may share it.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`source` may be empty: then only `render` fails. `now` is for `strftime_now`.

        Raises UnsupportedTokenizer for a template that does not parse.
        """
        self._source = source
        self._special = tokenizer.special
        self._limits = limits or RenderLimits()
        self._template = _compiled(source, now) if source else None
        card = tokenizer.card
        tokens = {
            "bos_token": tokenizer.token_name(card.bos_id),
            "eos_token": tokenizer.token_name(card.eos_ids[0] if card.eos_ids else None),
        }
        self._tokens = {name: text for name, text in tokens.items() if text is not None}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt for some messages.

        `variables` are further names for the template (e.g. enable_thinking). Raises TextError:
        for bad messages, with what the template itself raises, and when it goes over its limits.
        """
        if self._template is None:
            raise TextError("this model has no chat template; use completions", "messages")
        plain: dict[str, Any] = {
            **(variables or {}),
            "messages": normalized(messages, knows_developer="developer" in self._source),
            "tools": list(tools) if tools else None,
        }
        mark = unused_mark(self._source, *_texts(plain))
        values = {
            **self._special.guard_all(plain, mark),
            **self._tokens,
            "add_generation_prompt": add_generation_prompt,
            BUDGET: Budget(self._limits),
        }
        try:
            marked = "".join(self._template.generate(values))
        except jinja2.TemplateError as error:
            raise TextError(str(error.message or error), "messages") from None
        except (TextError, MemoryError):
            raise
        except RecursionError:
            raise TextError("the messages are nested too deeply", "messages") from None
        except Exception as error:  # whatever Python raises for values the template did not expect
            raise TextError(f"the chat template fails on them: {error}", "messages") from None
        return Rendered(marked, mark)


def _compiled(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise UnsupportedTokenizer(
            f"the chat template is longer than {MAX_SOURCE_CHARS} characters"
        )
    environment = BoundedEnvironment()
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    try:
        return environment.compile_bounded(source)
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedTokenizer(f"chat template, line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError) as error:  # too deep for jinja, or for Python's compiler
        raise UnsupportedTokenizer(f"the chat template cannot be compiled: {error}") from None


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
