"""Templates cannot reach Python. The tokenizer workers limit their computations
(tests/text/test_tokenizer_workers.py)."""

import pytest

from pdserve.text import TemplateInput, TextError
from pdserve.text.templates import ChatTemplate
from pdserve.text.tokenizer.tokenizer import Tokenizer

ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "filter": "{{ '' | attr('__class__') | string }}{{ ''.__class__.x }}",
    "globals": "{{ raise_exception.__globals__['x'] }}",
    "mutation": "{{ messages.append(1) }}",
}


def render(tokenizer: Tokenizer, source: str) -> str:
    return (
        ChatTemplate(source, tokenizer)
        .render(TemplateInput([{"role": "user", "content": "hello"}]))
        .text
    )


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_python_is_out_of_reach(smollm: Tokenizer, source: str) -> None:
    with pytest.raises(TextError):
        render(smollm, source)


def test_format_reveals_no_python_object(smollm: Tokenizer) -> None:
    assert render(smollm, "[{{ '{0.__class__.__init__}'.format(1) }}]") == "[]"


def test_compiling_a_template_computes_nothing(smollm: Tokenizer) -> None:
    """Compile within limits that only a render may exceed."""
    ChatTemplate("{{ 9 ** 99999999 }}{% set x = 9 ** 99999999 %}", smollm)
