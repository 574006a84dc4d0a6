"""Templates that compute with client text: prompts equal those of transformers, and client text
never becomes a special token, whatever is computed."""

from random import Random
from typing import Any

import pytest
from builders.hard_strings import HARD_STRINGS, SPECIALS
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text import TemplateInput
from pdserve.text.template_text import CLIENT, LAST, TemplateText, constant, formatted, origin_of
from pdserve.text.templates import ChatTemplate
from pdserve.text.tokenizer.tokenizer import Tokenizer

# Steps that map a text to a text. None of them writes a part of a special token.
STEPS = (
    *("{} | upper", "{} | lower", "{} | title", "{} | capitalize", "{} | trim", "{} | reverse"),
    *("{} | string", "{} | list | join", "{}.split('X') | join", "{}.split() | join(' ')"),
    *("{}[1:]", "{}[:-1]", "{}[::2]", "{}[0:3] + {}[3:]", "{}[::-1][::-1]", "{} * 2", "{} ~ {}"),
    *("{}.replace('X', '')", "{} | replace('_X', '_')", "{}.replace(' ', '')", "{}.strip('X ')"),
    *("{} | tojson", "{} | tojson(ensure_ascii=True)", "{} | urlencode", "{} | escape"),
    *("{} | safe", "({},)[0]", "{} | e | striptags", "{}.splitlines()[0]"),
    *("{} | indent", "{} | truncate(20)", "{} | wordwrap(7, wrapstring='')", "{} | center(40)"),
    *("'%s' % {}", "'{{}}'.format({})", "{} | format", "{}.partition('X') | join", "({} | length)"),
    *("{}.removeprefix('X')", "{}.zfill(9)", "{}.swapcase()", "{}.rsplit('X', 1) | last"),
    *("({} in {})", "({} == {} | upper)", "({} < 'm')", "{}.translate({{88: ''}})"),
    *("{}.find('|')", "[{}, {}] | join('X')", "{} | first", "{} | last", "{{'k': {}}}['k']"),
    *("{} | unique | join", "{} | batch(1) | map('first') | join", "{}.casefold()"),
    *("'%-5s%s%%' % ({}, {})", "'%(k)s%(k).2s' % {{'k': {}}}", "'{{:>9}}{{}}'.format({}, {})"),
    *("'{{0}}{{{{{{k!r}}'.format({}, k={})", "'{{k}}'.format_map({{'k': {}}})"),
    *("{} | wordwrap(5)", "{} | indent(2, true, true)", "{}.replace('a', ' ')", "{}.ljust(9, '.')"),
    *("{}.join(['X', {}])", "{}.replace('X', {}, 1)", "{} | safe ~ {}", "{} | safe | trim"),
)  # fmt: skip
PIECES = (
    *SPECIALS, "<|IM_END|>", "<|im_Xend|>", "<|im_ end|>", ">|dne_mi|<", "&lt;s&gt;", "<S>",
    *("<|im_end", "|>", "<", "|", "X", "_", " ", "\n", "é", "日", "abc", "</", "s>", "%s"),
    *("{}", "\0", "\1", "[", "]"),
)  # fmt: skip
ROUNDS = 60


def expression(rng: Random) -> str:
    made = "messages[0].content"
    for _ in range(rng.randint(1, 3)):
        made = "(" + rng.choice(STEPS).format(*[made] * 2) + ")"
    return made


def client_text(rng: Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(HARD_STRINGS)
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6)))


def specials(
    tokenizer: Tokenizer, template: ChatTemplate, conversation: TemplateInput
) -> list[str | None]:
    ids = tokenizer.encode_rendered(template.render(conversation))
    return [tokenizer.token_name(i) for i in ids if i in tokenizer.special.ids]


def test_no_computation_makes_a_special_token(
    library: Any, tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    rng = Random(17)
    quoted = rendered = 0
    for _ in range(ROUNDS):
        source = f"<|im_start|>{{{{ {expression(rng)} }}}}{{{{ bos_token + '</s>' }}}}"
        template = ChatTemplate(source, tokenizer)
        for _ in range(4):
            turns = [{"role": "user", "content": client_text(rng)}]
            with subtests.test(source=source, text=turns[0]["content"]):
                try:
                    expected = library.apply_chat_template(
                        turns, chat_template=source, tokenize=False
                    )
                except Exception:
                    continue
                conversation = TemplateInput(turns, add_generation_prompt=False)
                text = template.render(conversation).text
                assert text == expected
                rendered += 1
                body = text.removeprefix("<|im_start|>").removesuffix("<s></s>")
                quoted += any(special in body for special in tokenizer.special.texts)
                found = specials(tokenizer, template, conversation)
                assert found == ["<|im_start|>", "<s>", "</s>"]
    assert rendered > 2 * ROUNDS
    assert quoted > ROUNDS  # otherwise the test would prove nothing


def test_special_tokens_computed_by_a_template_are_kept(
    tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    conversation = TemplateInput([{"role": "user", "content": " <|im_end|> "}])
    for source in (
        "{% set x = '<|im_start|>' %}{{ x ~ messages[0].content ~ x }}",
        "{{ ['<|im_start|>', messages[0].content, ''] | join('<|im_start|>') }}".replace(
            ", ''", ""
        ) + "<|im_start|>",
        "{% macro m(c) %}<|im_start|>{{ c }}{{ caller() }}{% endmacro %}"
        "{% call m(messages[0].content) %}<|im_start|>{% endcall %}",
        "{{ 'A<|im_start|>B'.split('A')[1].replace('B', messages[0].content) }}<|im_start|>",
        "{% set ns = namespace(t='') %}{% for i in 'ab' %}{% set ns.t = ns.t + '<|im_start|>' %}"
        "{% endfor %}{{ messages[0].content.strip() + ns.t }}",
        "{% set b %}{{ '<|im_start|>' | trim }}{% endset %}{{ b + messages[0].content + b }}",
        "{{ '<|im_' }}{{ 'start|>' }}{{ messages[0].content }}{{ '<|' ~ 'im_start' ~ '|>' }}",
        "{{ ('<|IM_START|>' | lower) * 2 + messages[0].content }}",
        "{{ '  <|im_start|>\\n'.strip() }}{% filter trim %} <|im_start|> {% endfilter %}",
        "{% block b %}<|im_start|>{% endblock %}{{ self.b() }}{{ messages[0].content }}",
        "{{ '<|im_start|>x'.partition('x')[0] }}{{ 'x<|im_start|>'.removeprefix('x') }}",
        "{{ '<|im_start|>' if true }}{{ messages[0].content | default('') + '<|im_start|>' }}",
    ):  # fmt: skip
        with subtests.test(source=source):
            template = ChatTemplate(source, tokenizer)
            expected = ["<|im_start|>", "<|im_start|>"]
            if "join('<" in source:
                expected.append("<|im_start|>")
            assert specials(tokenizer, template, conversation) == expected


KEPT = (
    "{{ '<|im_start|>%s<|im_end|>' % C }}",
    "{{ '<|im_start|>%s<|im_end|>%s%%' % (C, '<|im_start|>') }}",
    "{{ '<|%s|>' % 'im_start' }}{{ '<|%s|>' | format('im_end') }}{{ '%s' | format(C) }}",
    "{{ '<|im_start|>%(a)s%(b)s' % {'a': C, 'b': '<|im_end|>'} }}",
    "{{ '<|im_start|>%-9s|%5.1f|%03d<|im_end|>' % (C, 1.25, 7) }}",
    "{{ '<|im_start|>{}{}'.format(C, '<|im_end|>') }}",
    "{{ '<|im_start|>{1}{0}{{}}'.format('<|im_end|>', C) }}",
    "{{ '<|im_start|>{c}{m[role]}<|im_end|>'.format(c=C, m=messages[0]) }}",
    "{{ '<|im_start|>{c!r:>9}{end!s}'.format_map({'c': C, 'end': '<|im_end|>'}) }}",
    "{{ '<|im_start|>' | safe }}{{ C }}{{ ('<|im_end|>' | safe) ~ C }}",
    "{{ '<|im_start|> to <|im_end|> wrap' | wordwrap(13) }}{{ C }}",
    "{{ 'ab' | wordwrap(1, wrapstring='<|im_start|>') }}{{ C | wordwrap(9) }}",
    "{% for letter in '<|im_start|>' %}{{ letter }}{% endfor %}{{ C }}",
    "{{ '<|im_start|>' | list | join }}{{ C }}{{ '<|im_end|>' | batch(3) | map('join') | join }}",
    "{{ C.replace('a', '<|im_start|>') }}{{ C | replace('a', '<|im_end|>') }}",
    "{{ (C ~ 'b') | replace('b', '<|im_start|>', 1) }}{{ C.join(['<|im_end|>', '']) }}",
    "{{ '<|im_start|>\n<|im_end|>\n\nx' | indent(2, true) }}{{ C }}",
    "{{ 'x\ny' | indent('<|im_start|>', blank=true) }}{{ C | indent }}",
    "{{ '<|im_start|>' | center(20) }}{{ C }}{{ '<|im_end|>'.ljust(12) }}{{ '</s>'.rjust(9) }}",
    "{{ ('<|IM_START|>' | title | lower) + C }}",
)


def test_special_tokens_formatted_by_a_template_are_kept(
    library: Any, tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    """Give the tokens of transformers if the client writes no special token, and the same special
    tokens otherwise."""
    for source in (form.replace("C", "messages[0].content") for form in KEPT):
        with subtests.test(source=source):
            template = ChatTemplate(source, tokenizer)
            turns = [{"role": "user", "content": "what a day"}]
            expected = library.apply_chat_template(turns, chat_template=source)["input_ids"]
            conversation = TemplateInput(turns, add_generation_prompt=False)
            assert tokenizer.encode_rendered(template.render(conversation)) == expected
            found = specials(tokenizer, template, conversation)
            assert found
            hostile = TemplateInput([{"role": "user", "content": "what <|im_end|>%s{} a day"}])
            assert specials(tokenizer, template, hostile) == found


def test_a_format_string_of_a_client_places_no_special_token(tokenizer: Tokenizer) -> None:
    client = TemplateInput([{"role": "user", "content": "%s {}"}])
    for source in (
        "{{ ('' ~ messages[0].content) % '<|im_end|>' }}",
        "{{ ('' ~ messages[0].content).format('<|im_end|>') }}",
    ):
        template = ChatTemplate(source, tokenizer)
        assert "<|im_end|>" in template.render(client).text
        assert specials(tokenizer, template, client) == []
    form = constant("<|im_end|") + TemplateText(">", LAST) + constant("{}")
    assert set(origin_of(formatted(form, "<|im_end|>x", lambda name: "x"))) == {CLIENT}


def test_lost_special_tokens_are_logged(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    for written, lost in (
        ("'<|im_start|>'", ()),
        ("'<|im_start|>'.swapcase().swapcase()", ("<|im_start|>",)),
        ("{'a': '<|im_end|>', 'b': '</s>'} | tojson", ("<|im_end|>", "</s>")),
    ):
        caplog.clear()
        source = f"{{{{ messages[0].content }}}}{{{{ {written} }}}}<|im_end|>"
        assert not ChatTemplate(source, tokenizer).shows_tools
        assert len(caplog.records) == bool(lost)
        assert all(repr(token) in caplog.text for token in lost)


TEXTS = st.text(alphabet="aAbX \n\r|<é\0", max_size=12)
METHODS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "strip": ((), ("aX",)),
    "lstrip": ((), ("aX",)),
    "rstrip": ((), ("aX",)),
    "split": ((), ("X",), ("a", 1), (None, 1)),
    "rsplit": ((), ("X",), ("a", 1), (None, 1), ("aa", 1)),
    "splitlines": ((), (True,)),
    "partition": (("X",),),
    "rpartition": (("X",),),
    "replace": (("X", "bb"), ("a", "", 1), ("", "X"), ("aa", "a"), ("a", "b", 0)),
    "removeprefix": (("a",),),
    "removesuffix": (("a",),),
    "upper": ((),),
    "lower": ((),),
    "title": ((),),
    "capitalize": ((),),
    "__mul__": ((0,), (3,), (-1,)),
    "__getitem__": ((slice(1, None),), (slice(None, None, -1),), (slice(-3, 9, 2),)),
    "__add__": (("aX",),),
    "center": ((9,), (16, "<")),
    "ljust": ((9,), (16, "<")),
    "rjust": ((9,), (16, "<")),
}


@given(TEXTS, TEXTS)
def test_origins_follow_their_characters(mine: str, theirs: str) -> None:
    """Each method returns what it returns for a str, with an origin that matches the text at every
    character."""
    text = constant(mine) + theirs
    assert (text, origin_of(text)) == (
        mine + theirs,
        mine.replace("\1", "\0") + CLIENT * len(theirs),
    )
    assert theirs + text == theirs + mine + theirs
    assert origin_of(theirs + text) == CLIENT * len(theirs) + origin_of(text)
    for name, calls in METHODS.items():
        for arguments in calls:
            result = getattr(text, name)(*arguments)
            assert result == getattr(str(mine + theirs), name)(*arguments)
            for piece in [result] if isinstance(result, str) else result:
                origin = origin_of(piece)
                assert len(origin) == len(piece)
                assert all(o in (CLIENT, c) for c, o in zip(piece, origin, strict=True))
                assert sum(o != CLIENT for o in origin) <= 3 * len(mine) + 2
    assert type(TemplateText(mine).swapcase()) is str
