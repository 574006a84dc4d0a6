"""Templates that would run for ever, fill memory or reach Python end in an error at once."""

import math
import time
import tracemalloc
from typing import Any

import pytest

from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.sandbox import RenderLimits
from pdserve.gateway.text.template import ChatTemplate
from pdserve.gateway.text.tokenizer import Tokenizer

# Counts decide, so that a verdict is the same on a busy machine.
LIMITS = RenderLimits(steps=400_000, chars=100_000, seconds=math.inf)
MOST_BYTES = 32 << 20  # that a refused render has held at once
BY_THE_CLOCK = RenderLimits(steps=1 << 60, chars=100_000, seconds=0.2)
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"

GROWING = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = STEP %}{% endfor %}"
RANGE = "range(99999)"

ENDLESS = {
    "empty loops": NESTED.replace("BODY", ""),
    "loops that set": "{% set n = namespace(x=0) %}" + NESTED.replace("BODY", "{% set n.x = b %}"),
    "filtered loops": "{% for a in R if R | select('odd') | list %}{% endfor %}".replace(
        "R", RANGE
    ),
    "calls": "{% macro m() %}{% endmacro %}" + NESTED.replace("BODY", "{{ m() }}"),
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(1) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "map": "{{ range(99999) | map('string') | list | map('trim') | list | length }}" * 60,
}
HUGE = {
    "literal output": NESTED.replace("BODY", "literal"),
    "output in a macro": "{% macro m() %}"
    + NESTED.replace("BODY", "x")
    + "{% endmacro %}{{ m() }}",
    "captured output": "{% set x %}" + NESTED.replace("BODY", "x") + "{% endset %}",
    "times": "{{ 'a' * 1000000000 }}",
    "times from the left": "{{ 1000000000 * 'a' }}",
    "list times": "{{ [1] * 1000000000 }}",
    "plus": GROWING.replace("STEP", "n.x + n.x"),
    "tilde": GROWING.replace("STEP", "n.x ~ n.x"),
    "power": "{{ 9 ** 999999999 }}",
    "squares": GROWING.replace("'ab'", "9").replace("STEP", "n.x * n.x"),
    "center": "{{ 'a' | center(1000000000) }}",
    "mapped center": "{{ ['a'] | map('center', 1000000000) | list }}",
    "indent": "{{ 'a\nb' | indent(width=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "tojson": "{{ [1] | tojson(indent=1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "nested str.format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "replace filter": "{{ ('a' * 90000) | replace('a', 'b' * 90000) }}",
    "replace method": "{{ ('a' * 90000).replace('a', 'b' * 90000) }}",
    "join filter": "{{ (['a' * 9000] * 9000) | join }}",
    "join method": "{{ ('a' * 9000).join(['a'] * 9000) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 9}) }}",
    "range": "{{ range(1000000000) | list }}",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "filter": "{{ '' | attr('__class__') | string }}{{ ''.__class__.x }}",
    "globals": "{{ raise_exception.__globals__['x'] }}",
    "mutation": "{{ messages.append(1) }}",
    "budget": "{{ self._TemplateReference__context['the budget'].x }}",
}


def render(tokenizer: Tokenizer, source: str, limits: RenderLimits = LIMITS) -> Any:
    template = ChatTemplate(source, tokenizer, limits)
    return template.render([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_templates_run_out_of_steps(smollm: Tokenizer, source: str) -> None:
    with pytest.raises(TextError, match=r"too long|too deeply|too much"):
        render(smollm, source)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_templates_run_out_of_time(smollm: Tokenizer, source: str) -> None:
    begun = time.thread_time()
    with pytest.raises(TextError, match=r"too long|too deeply|too much"):
        render(smollm, source, BY_THE_CLOCK)
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_huge_results_are_refused_before_they_are_made(smollm: Tokenizer, source: str) -> None:
    template = ChatTemplate(source, smollm, LIMITS)
    tracemalloc.start()
    try:
        with pytest.raises(TextError, match=r"too much|too large|width|translate|[Rr]ange"):
            template.render([{"role": "user", "content": "hello"}])
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_python_is_out_of_reach(smollm: Tokenizer, source: str) -> None:
    with pytest.raises(TextError):
        render(smollm, source)


def test_format_shows_nothing_of_python(smollm: Tokenizer) -> None:
    assert render(smollm, "[{{ '{0.__class__.__init__}'.format(1) }}]").text == "[]"


def test_templates_cannot_name_the_budget(smollm: Tokenizer) -> None:
    with pytest.raises(UnsupportedTokenizer):
        render(smollm, "{{ 1 | a loop }}")


def test_the_deadline_is_of_the_clock_given(smollm: Tokenizer) -> None:
    ticks = iter(range(10_000))
    limits = RenderLimits(seconds=50, clock=lambda: float(next(ticks)))
    source = "{% for m in range(1000) %}{{ m }}{% endfor %}"
    with pytest.raises(TextError, match="too long"):
        ChatTemplate(source, smollm, limits).render([{"role": "user", "content": "a"}])
    assert 50 < next(ticks) < 60


def test_ordinary_templates_keep_their_meaning(smollm: Tokenizer) -> None:
    cases = {
        "{% for x in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{% endfor %}": "1/3,2/3,3/3",
        "{% for x in [] %}{% else %}none{% endfor %}": "none",
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}": "a=1",
        "{% for c in 'ab' if c != 'a' %}{{ c }}{% endfor %}": "b",
        "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}": "12",
        "{{ 'a' ~ 1 ~ none }}{{ 'x' + 'y' }}{{ 2 * 3 }}{{ 7 % 4 }}{{ 2 ** 3 }}": "a1Nonexy638",
        "{{ '%s-%02d' % ('a', 5) }}{{ '%s' | format('b') }}{{ '{:>3}'.format('c') }}": "a-05b  c",
        "{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c', 'd']) }}": "a, bc-d",
        "{{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }}": "1+2",
        "{{ 'aXbX' | replace('X', '-', 1) }}{{ 'aX'.replace('X', '') }}": "a-bXa",
        "{{ 'a\nb' | indent(2) }}{{ 'x' | center(3) }}": "a\n  b x ",
        "{% filter upper %}a{{ 'b' }}{% endfilter %}": "AB",
        "{% set x %}a{{ 1 }}{% endset %}{{ x | length }}": "2",
        "{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(1) %}c{% endcall %}": "1c",
        "{{ missing }}{{ missing is defined }}{{ none }}": "FalseNone",
        "{{ messages[0].content.split('l') | last }}{{ messages[0]['content'][::-1] }}": "oolleh",
        "{{ [3, 1] | sort | first }}{{ [1, 2] | map('string') | join }}": "112",
        "{{ [{'a': 1}] | selectattr('a', 'equalto', 1) | map(attribute='a') | list }}": "[1]",
    }
    for source, expected in cases.items():
        assert render(smollm, source).text == expected, source
