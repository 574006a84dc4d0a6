"""The jinja2 environment of chat templates: the one of Hugging Face transformers, sandboxed, with
texts that record whether the template or the client wrote each character (template_text.py).

The sandbox keeps a template from reaching Python. It does not limit the template's computation.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import do_indent, do_replace, do_title, do_wordwrap, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

from pdserve.text.errors import UnsupportedTokenizer
from pdserve.text.template_text import (
    SafeText,
    TemplateText,
    concatenated,
    constant,
    formatted,
    indented,
    is_plain,
    recased,
    wrapped,
)

MAX_SOURCE_CHARS = 1 << 18
# Methods of client text whose result may contain text that the template passes as an argument.
_INSERTING = frozenset(("join", "replace"))


def compile_template(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    """Compile the source of a chat template; the compiled template renders a TemplateText. Raises
    UnsupportedTokenizer if the source exceeds MAX_SOURCE_CHARS or does not compile."""
    if len(source) > MAX_SOURCE_CHARS:
        raise UnsupportedTokenizer(
            f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}"
        )
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        optimized=False,  # compute constants during rendering, not here
        finalize=_unchanged,
    )
    environment.filters |= {
        "tojson": _tojson,
        "join": _join,
        "replace": _replace,
        "safe": _safe,
        "title": _title,
        "indent": _indent,
        "wordwrap": _wordwrap,
    }
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedTokenizer(
            f"the chat template is invalid in line {error.lineno}: {error.message}"
        ) from None
    except (RecursionError, SyntaxError) as error:  # too deep for jinja2 or Python's compiler
        raise UnsupportedTokenizer(f"the chat template cannot be compiled: {error}") from None


class _Generator(CodeGenerator):
    """A jinja2 code generator that makes the template's own texts TemplateTexts, so that their
    origin is known, also in concatenations."""

    def _text(self, text: str) -> str:
        """Return the Python code for a text of the template: a look-up in the environment's
        constants."""
        assert isinstance(self.environment, _Environment)
        constants = self.environment.constants
        constants.append(constant(text))
        return f"environment.constants[{len(constants) - 1}]"

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._text("".join(group))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(self._text(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandboxed environment of one template, with the texts that the template itself
    contains."""

    code_generator_class = _Generator
    concat = staticmethod(concatenated)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.constants: list[TemplateText] = []

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is str and attribute in _INSERTING:
            obj = TemplateText(obj)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap str.format as jinja2's sandbox does, and record the origin of the result's
        characters."""
        plain = super().wrap_str_format(value)
        form = getattr(value, "__self__", None)
        if plain is None or not isinstance(form, TemplateText):
            return plain
        formatter = SandboxedFormatter(self)

        def formatting(*args: Any, **kwargs: Any) -> str:
            text = plain(*args, **kwargs)
            if value.__name__ == "format_map":
                kwargs = args[0]
            return formatted(form, text, lambda name: formatter.get_field(name, args, kwargs)[0])

        return formatting


@jinja2.pass_context
def _unchanged(context: Context, value: Any) -> Any:
    """Return the value unchanged. Because it takes the context, jinja2 cannot evaluate output when
    it compiles the template."""
    return value


class _Generation(Extension):
    """Handles the tag `{% generation %}`, which marks text for training, by just rendering its
    body."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@jinja2.pass_eval_context
def _join(
    context: EvalContext, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    """Join values like jinja2's filter `join`, and keep the origin of each character."""
    if type(d) is str:
        d = TemplateText(d)
    return sync_do_join(context, value, d, attribute)


@jinja2.pass_eval_context
def _replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Replace text like jinja2's filter `replace`, and keep the origin of each character, also of
    replacements inside a client's text."""
    if context.autoescape:
        return do_replace(context, s, old, new, count)
    text = str(s)
    source = TemplateText(text) if type(text) is str else text
    return source.replace(str(old), str(new), -1 if count is None else count)


def _safe(value: Any) -> Markup:
    return SafeText(value) if isinstance(value, TemplateText) else Markup(value)


def _title(s: Any) -> str:
    text = do_title(s)
    return recased(s, text) if isinstance(s, TemplateText) else text


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if not is_plain(s):
        return do_indent(s, width, first, blank)
    indent = width if isinstance(width, str) else " " * width
    return indented(s, indent, first=first, blank=blank)


@jinja2.pass_environment
def _wordwrap(
    environment: jinja2.Environment,
    s: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> str:
    if not is_plain(s):
        return do_wordwrap(environment, s, width, break_long_words, wrapstring, break_on_hyphens)
    return wrapped(
        s,
        environment.newline_sequence if wrapstring is None else wrapstring,
        width=width,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=break_long_words,
        break_on_hyphens=break_on_hyphens,
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's filter, do not escape HTML: models are trained on plain JSON.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
