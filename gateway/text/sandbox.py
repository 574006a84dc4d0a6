"""A jinja2 environment whose templates cannot run for ever, fill memory or reach Python.

Every loop iteration, call, filter, operator and output, and every item that `map` or `select`
looks at, is a step, and passes through the `Budget` of its render. The budget bounds the number of
steps, the length of the output and of every string, list and integer made on the way, and, between
steps, the processor seconds of the rendering thread. It does not bound a single operation of Python
on values within these sizes, which takes milliseconds, nor a parse, whose source is short. Whether
steps or sizes run out first depends on the template alone; only a template whose steps are slow
reaches the seconds.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Names that no template can write: they hold spaces.
BUDGET = "the budget"
LOOP, LITERAL, CHECKED, WIDTH, CONCAT = "a loop", "a literal", "a result", "a width", "a concat"
_WIDE_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "wordwrap"})
_WIDE_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_MAX_WIDTH = 100
_MAX_BITS = 4096
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\*|\d{3})")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{3})")


class OverBudget(jinja2.TemplateError):
    """A render took too long or made too much."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one render may use: operations, Unicode characters, and the thread's processor time."""

    steps: int = 500_000
    chars: int = 16 << 20
    seconds: float = 2.0
    clock: Callable[[], float] = time.thread_time


class Budget:
    """A Budget counts what one render has left. Its methods raise OverBudget."""

    def __init__(self, limits: RenderLimits) -> None:
        self._clock = limits.clock
        self._deadline = limits.clock() + limits.seconds
        self._steps = limits.steps
        self._chars = limits.chars
        self._output = 0

    def step(self) -> None:
        """Counts one operation, before it is done."""
        self._steps -= 1
        if self._steps < 0 or self._clock() > self._deadline:
            raise OverBudget("the chat template ran for too long")

    def output(self, chars: int) -> None:
        self._output += chars
        self.size(self._output)

    def size(self, count: int) -> None:
        if count > self._chars:
            raise OverBudget("the chat template made too much text")

    def checked(self, value: Any) -> Any:
        """Returns the value unless it has grown too large."""
        self.step()
        if isinstance(value, str | bytes | list | tuple | dict):
            self.size(len(value))
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise OverBudget("the chat template made too large a number")
        return value


class _Bounding(NodeTransformer):
    """Puts the budget's filters around what a template could use to run or grow without end."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, LOOP)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return _filter(nodes.Const(node.data), LITERAL)  # so that it is counted as output

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.name in _WIDE_FILTERS:
            node.args = [_filter(arg, WIDTH) for arg in node.args]
            for pair in node.kwargs:
                pair.value = _filter(pair.value, WIDTH)
            node.dyn_args = node.dyn_kwargs = None
        return node if node.node is None else _filter(node, CHECKED)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), CONCAT)


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


@jinja2.pass_context
def _loop(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget: Budget = context[BUDGET]
    for item in items:
        budget.step()
        yield item


@jinja2.pass_context
def _literal(context: Context, text: str) -> str:
    return text


@jinja2.pass_context
def _checked(context: Context, value: Any) -> Any:
    return context[BUDGET].checked(value)


@jinja2.pass_context
def _width(context: Context, value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise OverBudget(f"the chat template asks for a width above {_MAX_WIDTH}")
    return value


@jinja2.pass_context
def _concat(context: Context, values: list[Any]) -> str:
    texts = [str(value) for value in values]
    context[BUDGET].size(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_context
def _output(context: Context, value: Any) -> str:
    text = str(value)
    budget: Budget = context[BUDGET]
    budget.step()
    budget.output(len(text))
    return text


@jinja2.pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = (context.environment.getitem(item, attribute) for item in value)
    texts = [str(item) for item in value]
    context[BUDGET].size(sum(map(len, texts)) + len(texts) * len(str(d)))
    return str(d).join(texts)


@jinja2.pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int = -1) -> str:
    text, old, new = str(value), str(old), str(new)
    context[BUDGET].size(text.count(old) * len(new))
    return text.replace(old, new, count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_percent(str(value))
    return str(value) % (kwargs or args)


def _check_percent(text: str) -> None:
    if _WIDE_PERCENT.search(text):
        raise OverBudget("the chat template asks for a width above two digits")


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


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it says nothing."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose every render carries a `Budget` under the name BUDGET."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_output,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters.update({LOOP: _loop, LITERAL: _literal, CHECKED: _checked})
        self.filters.update({WIDTH: _width, CONCAT: _concat})
        self.filters.update({"join": _join, "replace": _replace, "format": _format})
        self.filters["tojson"] = _tojson
        del self.filters["urlize"], self.globals["lipsum"]

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError, and RecursionError for absurd nesting."""
        return self.from_string(_Bounding().visit(self.parse(source)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = __context[BUDGET]
        budget.step()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            if __obj.__name__ == "join" and len(args) == 1:
                return _join(__context, args[0], __obj.__self__)
            _check_method(budget, __obj.__self__, __obj.__name__, args, kwargs)
        return budget.checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns what a template gets for `text.format`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise OverBudget("the chat template asks for a width above two digits")
        return wrapped

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: Any = None,
    ) -> Any:
        """Applies a filter by its name, as `map` and its like do."""
        assert context is not None  # they all have one
        if name in _WIDE_FILTERS:
            for arg in [*(args or ()), *(kwargs or {}).values()]:
                _width(context, arg)
        result = super().call_filter(name, value, args, kwargs, context, eval_ctx)
        return context[BUDGET].checked(result)

    def call_test(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: Any = None,
    ) -> Any:
        """Applies a test by its name, as `select` and its like do."""
        assert context is not None  # they all have one
        context[BUDGET].step()
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context[BUDGET]
        budget.step()
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                    budget.size(len(sequence) * times)
        elif operator == "**" and not (isinstance(right, int) and abs(right) <= 64):
            raise OverBudget("the chat template asks for too large a power")
        elif operator == "%" and isinstance(left, str):
            _check_percent(left)
        return budget.checked(super().call_binop(context, operator, left, right))


def _check_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuses methods of str whose result could be far longer than what they are given."""
    if name in _WIDE_METHODS:
        if any(isinstance(arg, int) and arg > _MAX_WIDTH for arg in [*args, *kwargs.values()]):
            raise OverBudget(f"the chat template asks for a width above {_MAX_WIDTH}")
    elif name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        budget.size(text.count(args[0]) * len(args[1]))
    elif name == "translate":
        raise OverBudget("the chat template uses str.translate")
