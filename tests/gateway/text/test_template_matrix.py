"""Sixty conversations in many chat templates: where transformers renders one, so does the gateway,
with the same text unless transformers' leaves something out."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.conversations import Conversation, conversations
from oracles.llama_cpp_templates import llama_cpp_templates

from pdserve.gateway.openai.bodies.schema import ChatBody
from pdserve.gateway.text.errors import TextError
from pdserve.gateway.text.templates.chat_template import ChatTemplate
from pdserve.gateway.text.tokenizer import Tokenizer

CONVERSATIONS = tuple(conversations())
AS_DATA = ("'type': 'text'", '"type": "text"', "None")  # lists and contents that are no text
OWN = {path.stem: path.read_text() for path in Path(__file__).parent.glob("*.jinja")} | {
    # They fail on null contents, on tools without a description, on later systems, on texts.
    "strict": """
{%- if tools %}{{- '<tools>' }}{%- for t in tools %}
{{- t.function.name + ': ' + t.function.description + (t.function.parameters | tojson) }}
{%- endfor %}{{- '</tools>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{- raise_exception('system first') }}{%- endif %}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('no such role') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' }}{%- if '<think>' in m.content %}{{- 'thought' }}{%- endif %}
{{- m.content + (m.thinking or '') }}{%- for c in m.tool_calls or [] %}
{{- c.function.name }}{%- for k, v in c.function.arguments | items %}{{- k ~ '=' ~ v }}{%- endfor %}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}""",
    # Roles alternate except for results; arguments are text, and a turn with calls has no content.
    "alternating": """
{%- set ns = namespace(n=0, system='') %}
{%- if tools %}{{- '[TOOLS]' + (tools | tojson) }}{%- endif %}
{%- if messages[0].role == 'system' %}{%- set ns.system = messages[0].content + '\\n' %}
{%- set messages = messages[1:] %}{%- endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('alternate') }}{%- endif %}
{%- set ns.n = ns.n + 1 %}{%- endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + ns.system + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[RESULT]' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}{%- for c in m.tool_calls %}
{{- '[CALL]' + c.function.name + c.function.arguments }}{%- endfor %}
{%- elif m.role == 'assistant' %}{{- m.content + '</s>' }}
{%- else %}{{- raise_exception('role') }}{%- endif %}{%- endfor %}""",
    # Contents are lists; a role that it does not know is left out.
    "lists": """
{%- for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}{{- part.text }}{%- endfor %}
{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}{{- '<|im_end|>' }}
{%- endfor %}{%- if tools %}{{- tools | map(attribute='function') | map('tojson') | join }}
{%- endif %}""",
}


def documented(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers documents it: with the arguments of calls as objects."""
    made = json.loads(json.dumps(message))
    for call in made.get("tool_calls", ()):
        try:
            value = json.loads(call["function"]["arguments"], parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError):
            continue
        if isinstance(value, dict):
            call["function"]["arguments"] = value
    return made


def as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def references(library: Any, source: str, given: Conversation) -> Iterator[str]:
    """What transformers renders of it: with arguments as objects, as texts, and of developers as
    they are, or as systems."""
    wire = [dict(message) for message in given.messages]
    for messages in ([documented(message) for message in wire], wire):
        for chat in (messages, [as_system(message) for message in messages]):
            try:
                yield library.apply_chat_template(
                    chat,
                    tools=list(given.tools) if given.tools else None,
                    chat_template=source,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except Exception:
                continue


def shown(text: str, given: Conversation) -> int:
    return sum(word in text for word in given.words)


def checked(
    given: Conversation, source: str, template: ChatTemplate, library: Any, tokenizer: Tokenizer
) -> str:
    """What came of it."""
    body = ChatBody.model_validate({"model": "m", "messages": list(given.messages)})
    asked = replace(body.conversation(), tools=given.tools)
    texts = list(references(library, source, given))
    try:
        rendered = template.render(asked)
    except TextError:
        if texts:
            raise
        return "refused by both"
    ids = tokenizer.encode_rendered(rendered)
    named = [tokenizer.token_name(i) for i in ids if i in tokenizer.special.ids]
    parts = tokenizer.special.split(rendered.text)
    written = [tokenizer.token_name(part) for part in parts if isinstance(part, int)]
    assert named == written  # no special token of the template's is lost
    whole = [
        text
        for text in texts
        if shown(text, given) == len(given.words)
        and not any(bad in text for bad in AS_DATA)
        and ("thinks" in text or "thinks" not in rendered.text)
    ]
    if whole:
        assert rendered.text in whole
        return "equal"
    assert shown(rendered.text, given) >= max((shown(text, given) for text in texts), default=0)
    if rendered.text in texts:
        return "equal, not whole"
    return "more than transformers'" if texts else "refused by transformers alone"


def check(
    templates: Mapping[str, str], library: Any, tokenizer: Tokenizer, subtests: pytest.Subtests
) -> Counter[str]:
    ends: Counter[str] = Counter()
    for name, source in templates.items():
        template = ChatTemplate(source, tokenizer)
        for given in CONVERSATIONS:
            with subtests.test(template=name, conversation=given.name):
                ends[checked(given, source, template, library, tokenizer)] += 1
    return ends


def test_there_are_sixty() -> None:
    assert len({given.name for given in CONVERSATIONS}) == 60


def test_templates_of_each_kind(
    library: Any, tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    ends = check(OWN, library, tokenizer, subtests)
    assert ends["equal"] > 90
    assert ends["refused by transformers alone"] > 50
    assert ends["more than transformers'"] > 10


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_templates_of_llama_cpp(
    library: Any, tokenizer: Tokenizer, subtests: pytest.Subtests, tmp_path_factory: Any
) -> None:
    templates = llama_cpp_templates()
    assert len(templates) >= 70
    ends = check(templates, library, tokenizer, subtests)
    assert ends["equal"] > 2000
