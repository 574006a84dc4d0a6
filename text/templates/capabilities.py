"""Finds out which kinds of messages a chat template can render, by rendering small test
conversations with it.

A template may silently drop a message of an unknown kind, or write None for missing content. Each
rendered text is therefore searched for the words of the test conversation.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pdserve.text.messages import EFFORTS, REASONING

Message = Mapping[str, Any]
NoContent = Literal["null", "absent", "empty"]
ThinkingForm = Literal["", "parts", "blocks"]
Tools = Sequence[Message] | None
Render = Callable[[Sequence[Message]], str | None]  # None: the template fails on the messages

RESULT_ROLES = ("tool", "observation")  # the second is GLM 4's
ALWAYS = ("reasoning_content", "thinking")  # names by which transformers passes reasoning


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The kinds of messages that a chat template can render. The defaults apply to a template that
    was not probed.

    systems: places where system turns are shown: "first", "several" at the beginning, "middle",
        "last", after the "result" of a tool, or "alone": later, if no system turn is first.
    efforts: values of `reasoning_effort` that the template accepts.
    thinking_form: form of reasoning inside the content of a turn; empty if the template shows
        reasoning in a separate field or not at all.
    list_roles, text_roles: roles whose content may be a list of parts, or a text.
    """

    tools: bool = True  # the prompt changes with tools
    calls: bool = True  # shows calls of earlier turns
    results: str = "tool"  # the role of tool results; empty: results are not shown
    text_arguments: bool = False  # needs the arguments of a call as JSON text, not as an object
    malformed_arguments: bool = False  # accepts a text that is not a JSON object as arguments
    parallel_calls: bool = True  # shows several calls of one turn
    no_content: NoContent = "empty"  # the content of a turn that only calls tools
    empty_beside_calls: bool = True  # shows calls beside an empty content
    text_beside_calls: bool = True  # shows calls beside a text
    named_results: bool = False  # needs the name of the called function in each result
    developer: bool = False
    systems: tuple[str, ...] = ("first", "several", "middle", "last", "result", "alone")
    reasoning: tuple[str, ...] = ALWAYS
    efforts: tuple[str, ...] = EFFORTS
    thinking_form: ThinkingForm = ""
    list_roles: tuple[str, ...] = ()
    text_roles: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")

    @classmethod
    def decoded(cls, text: bytes) -> "Capabilities":
        """Decode the capabilities from the JSON object in which a tokenizer worker sends them."""
        values: dict[str, Any] = json.loads(text)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values)

    def nearest_effort(self, effort: str) -> str | None:
        """Return the accepted reasoning effort that is nearest to a requested one; None if the
        template accepts none, and then the request's effort, which is only a hint, is ignored."""
        if effort in self.efforts:
            return effort
        candidates = [name for name in self.efforts if name != "none"] if effort != "none" else []
        rank = EFFORTS.index
        return min(candidates, key=lambda name: abs(rank(name) - rank(effort)), default=None)


SYSTEM, RULE = "qzsystem", "qzrule"
USER, ANSWER, RESULT, THOUGHT = "qzuser", "qzanswer", "qzresult", "qzthought"
FIELD, SECOND, NAMED = "qzfield", "qzsecond", "qznamed"
TOOL, CALLED, KEY, VALUE = "qztool", "qzcalled", "qzkey", "qzvalue"
_CALL_ID = "qzcall001"  # Mistral's templates require nine letters and digits
_PARAMETERS = {
    "type": "object",
    "properties": {KEY: {"type": "string", "description": "a text"}},
    "required": [KEY],
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": TOOL, "description": "a tool", "parameters": _PARAMETERS},
    }
]
_USER = {"role": "user", "content": USER}
_ANSWER = {"role": "assistant", "content": ANSWER}
_RESULTS = {
    role: {"role": role, "tool_call_id": _CALL_ID, "name": NAMED, "content": RESULT}
    for role in RESULT_ROLES
}
# By form: the type and the field of a part with reasoning, and the type of a text part.
_THINKING: dict[ThinkingForm, tuple[str, str, str]] = {
    "parts": ("thinking", "thinking", "text"),
    "blocks": ("thoughts", "text", "response"),  # Apertus
}
_CONTENT: dict[NoContent, dict[str, Any]] = {
    "null": {"content": None},
    "absent": {},
    "empty": {"content": ""},
}


class ContentForm(NamedTuple):
    """Whether a role's content is shown as a text, and whether as a list of several parts."""

    text: bool
    parts: bool


def probe_template(
    render_with: Callable[[Sequence[Message], Tools], str | None],
    render_with_effort: Callable[[Sequence[Message], Tools, str], str | None],
) -> Capabilities:
    """Render test conversations and return the template's capabilities. `render_with` renders
    messages with tools, `render_with_effort` also with a reasoning effort; both return None if the
    template fails."""

    def rendering(tools: Tools) -> Render:
        def render(messages: Sequence[Message]) -> str | None:
            text = render_with(messages, tools)
            return text if text is None else text.lower()

        return render

    bare, tooled = rendering(None), rendering(_TOOLS)
    users: Sequence[Message] = _USER, {**_USER, "content": _parts(USER)}
    accepted = [(user, f) for f in (bare, tooled) for user in users if f([user]) is not None]
    if not accepted:
        return Capabilities()
    first, plain = accepted[0]  # some templates render only conversations with tools
    tools = _TOOLS if plain is tooled else None
    offering = accepted[-1][1]  # others fail on tools
    forms = _content_forms(offering)
    listed_roles = [role for role, form in forms.items() if not form.text]
    bare, tooled, plain, offering = (
        _in_lists(render, listed_roles) for render in (bare, tooled, plain, offering)
    )
    texts_as_object = _call_texts(offering, {KEY: VALUE})
    texts_as_text = _call_texts(offering, f'{{"{KEY}": "{VALUE}"}}')
    text_arguments = _shows(texts_as_text, VALUE) and (
        not _shows(texts_as_object, VALUE)
        or (
            _shows(texts_as_object, f"'{KEY}': '{VALUE}'")
            and _shows(texts_as_text, f'{{"{KEY}": "{VALUE}"}}')
        )
    )
    texts = texts_as_text if text_arguments else texts_as_object
    no_content = _no_content(texts)
    malformed = _call(VALUE, no_content)
    call = _call(f'{{"{KEY}": "{VALUE}"}}' if text_arguments else {KEY: VALUE}, no_content)
    results = _result_role(offering, call)
    result: Message = _RESULTS[results or "tool"]
    if results:
        forms["tool"] = _content_form(offering, [_USER, call], result)
        if not forms["tool"].text:
            result = _in_list(result)
    forms["developer"] = forms["system"]
    names = _reasoning(offering, call, result)
    return Capabilities(
        tools=any(tooled([user]) not in (None, bare([user])) for user in users),
        calls=any(map(_shows_call, texts.values())),
        results=results,
        text_arguments=text_arguments,
        malformed_arguments=offering([_USER, malformed, result]) is not None,
        parallel_calls=_shows_several(offering, call, result),
        no_content=no_content,
        empty_beside_calls=no_content == "empty" or _shows_call(texts.get("empty", "")),
        text_beside_calls=_shows_calls_beside_text(offering, call, result),
        named_results=_needs_names(offering, call, result),
        developer=_knows_developer(plain),
        systems=_systems(plain, call, result),
        reasoning=names or ALWAYS,
        efforts=tuple(
            effort for effort in EFFORTS if render_with_effort([first], tools, effort) is not None
        ),
        thinking_form="" if names else _thinking_form(offering),
        list_roles=tuple(role for role, form in forms.items() if form.parts),
        text_roles=tuple(role for role, form in forms.items() if form.text),
    )


def _call(arguments: Any, content: NoContent) -> dict[str, Any]:
    function = {"name": CALLED, "arguments": arguments}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", **_CONTENT[content], "tool_calls": calls}


def _parts(*texts: str) -> list[dict[str, str]]:
    """Return texts as a list of content parts. Each has a field that a template should ignore; if
    its name is rendered, the template just dumps the parts as data."""
    return [{"type": "text", "text": text, FIELD: FIELD} for text in texts]


def _call_texts(render: Render, arguments: Any) -> dict[NoContent, str]:
    """Render a conversation with a tool call, with each form of content that a turn with calls may
    have; return the rendered texts by form, without those that fail."""
    texts: dict[NoContent, str] = {}
    for content in _CONTENT:
        call = _call(arguments, content)
        for result in _RESULTS.values():
            for form in (result, _in_list(result)):
                text = render([_USER, call, form])
                if text is not None:
                    texts.setdefault(content, text)
    return texts


def _shows(texts: Mapping[NoContent, str], word: str) -> bool:
    return any(word in text for text in texts.values())


def _shows_call(text: str) -> bool:
    return VALUE in text or CALLED in text


def _no_content(texts: Mapping[NoContent, str]) -> NoContent:
    """Return the form of content (null, absent, empty) for turns that only call tools: one with
    which the template shows the call, and writes "none" least often."""
    if not texts:
        return "empty"
    return min(
        texts, key=lambda content: (not _shows_call(texts[content]), texts[content].count("none"))
    )


def _result_role(render: Render, call: Message) -> str:
    for role, result in _RESULTS.items():
        if any(_shown(render, [_USER, call], result)):
            return role
    return ""


def _content_forms(render: Render) -> dict[str, ContentForm]:
    """Find out for user, system and assistant turns whether the template shows their content as a
    text or as a list of parts. Tool results are probed later, since they must follow a call."""
    forms: dict[str, ContentForm] = {}
    turns: dict[str, tuple[list[Message], list[Message]]] = {
        "user": ([], []),
        "system": ([], [_USER]),
        "assistant": ([_USER], [_USER]),
    }
    in_lists = render
    for role, (preceding, following) in turns.items():
        forms[role] = _content_form(in_lists, preceding, {"role": role}, following)
        if not forms["user"].text:
            in_lists = _in_lists(render, ["user"])
    return forms


def _content_form(
    render: Render,
    preceding: list[Message],
    turn: Message,
    following: Sequence[Message] = (),
) -> ContentForm:
    text, part = _shown(render, preceding, turn, following)
    parts = part and SECOND in (
        render([*preceding, {**turn, "content": _parts(RULE, SECOND)}, *following]) or ""
    )
    return ContentForm(text or not part, parts)


def _shown(
    render: Render,
    preceding: list[Message],
    turn: Message,
    following: Sequence[Message] = (),
) -> tuple[bool, bool]:
    """Return whether the template shows the content of a turn if it is a text, and if it is a list
    of parts."""
    plain, listed = (
        render([*preceding, {**turn, "content": content}, *following]) or ""
        for content in (RULE, _parts(RULE))
    )
    return RULE in plain, RULE in listed and FIELD not in listed


def _in_lists(render: Render, roles: Collection[str]) -> Render:
    """Wrap a render function so that the contents of these roles are passed as lists of parts."""

    def render_in_lists(messages: Sequence[Message]) -> str | None:
        return render([_in_list(m) if m["role"] in roles else m for m in messages])

    return render_in_lists


def _in_list(message: Message) -> Message:
    content = message.get("content")
    if not content or not isinstance(content, str):
        return message
    return {**message, "content": _parts(content)}


def _shows_several(render: Render, call: Message, result: Message) -> bool:
    """Return whether the template shows several calls of one turn and their results. Also True if
    it does not show them one per turn either, since splitting the turn then does not help."""
    first, second = (_copied(call, number) for number in "12")
    both = {**first, "tool_calls": [*first["tool_calls"], *second["tool_calls"]]}
    results = [_copied(result, number) for number in "12"]
    words = [f"{word}{number}" for word in (VALUE, RESULT) for number in "12"]
    one_by_one = [_USER, first, results[0], second, results[1]]
    together, apart = render([_USER, both, *results]), render(one_by_one)
    return _shows_all(together, words) or not _shows_all(apart, words)


def _shows_all(text: str | None, words: Collection[str]) -> bool:
    return text is not None and all(word in text for word in words)


def _shows_calls_beside_text(render: Render, call: Message, result: Message) -> bool:
    """Return whether the template shows a call in a turn that also has text. Also True if it does
    not show them in two turns either, since splitting the turn then does not help."""
    text_turn, following = {"role": "assistant", "content": RULE}, [result, _ANSWER, _USER]
    together = render([_USER, {**call, **text_turn}, *following])
    apart = render([_USER, text_turn, call, *following])
    return _shows_all(together, [VALUE]) or not _shows_all(apart, [RULE, VALUE, RESULT])


def _needs_names(render: Render, call: Message, result: Message) -> bool:
    """Return whether a tool result needs the name of the called function: without it the template
    fails, or leaves out just the name."""
    unnamed = {key: value for key, value in result.items() if key != "name"}
    text, text_without_name = (
        render([_USER, call, result]),
        render([_USER, call, unnamed]),
    )
    if text is None:
        return False
    return text_without_name is None or (
        NAMED in text and text.replace(NAMED, "") == text_without_name
    )


def _copied(message: Message, number: str) -> Any:
    """Return a copy of a test message with a number appended to its words, so that its text differs
    from that of the other copies."""
    text = json.dumps(message)
    for word in (VALUE, RESULT):
        text = text.replace(word, word + number)
    return json.loads(text.replace(_CALL_ID, _CALL_ID[:-1] + number))


def thinking_content(form: ThinkingForm, thought: str | None, content: Any) -> Any:
    """Return the content of an assistant turn (a text, text parts or None) as parts, with the
    reasoning as the first part if there is any. An empty text becomes a part only if there is no
    reasoning."""
    thinking_type, field, text_type = _THINKING[form]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    parts = [{"type": thinking_type, field: thought}] if thought else []
    parts += [{"type": text_type, "text": text} for text in texts if text or not thought]
    return {"blocks": parts} if form == "blocks" else parts


def _thinking_form(render: Render) -> ThinkingForm:
    """Return the form of reasoning inside the content ("parts" or "blocks") that the template
    shows; "" if it shows neither."""
    for form in _THINKING:
        content = thinking_content(form, THOUGHT, ANSWER)
        for part in content["blocks"] if form == "blocks" else content:
            part[FIELD] = FIELD  # reveals a template that dumps parts as data
        text = render([_USER, {**_ANSWER, "content": content}, _USER]) or ""
        if _shows_all(text, [THOUGHT, ANSWER]) and FIELD not in text:
            return form
    return ""


def _knows_developer(render: Render) -> bool:
    """Return whether the template treats the role "developer" differently from an unknown role."""
    as_developer = render([{"role": "developer", "content": RULE}, _USER]) or ""
    as_unknown = render([{"role": "qzrole", "content": RULE}, _USER])
    return RULE in as_developer and (
        as_unknown is None or as_unknown.replace("qzrole", "developer") != as_developer
    )


def _systems(render: Render, call: Message, result: Message) -> tuple[str, ...]:
    first, rule = {"role": "system", "content": SYSTEM}, {"role": "system", "content": RULE}
    places: dict[str, list[Message]] = {
        "first": [rule, _USER],
        "several": [first, rule, _USER],
        "middle": [first, _USER, _ANSWER, rule, _USER],
        "last": [first, _USER, rule],
        "alone": [_USER, _ANSWER, rule, _USER],
        "result": [first, _USER, call, result, rule],
    }
    shown_places = []
    for place, messages in places.items():
        text = render(messages) or ""
        if RULE in text and (SYSTEM in text or first not in messages):
            shown_places.append(place)
    return tuple(shown_places)


def _reasoning(render: Render, call: Message, result: Message) -> tuple[str, ...]:
    """Return the names of the message fields in which to pass reasoning so that the template shows
    it; empty if it shows none."""

    def is_shown(name: str) -> bool:
        extra_fields = {name: THOUGHT}
        turns = (
            [_USER, {**call, **extra_fields}, result],
            [_USER, {**_ANSWER, **extra_fields}, _USER],
        )
        return any(THOUGHT in (render(messages) or "") for messages in turns)

    if any(map(is_shown, ALWAYS)):
        return ALWAYS
    other_names = [name for name in REASONING if name not in ALWAYS and is_shown(name)]
    return (*ALWAYS, *other_names) if other_names else ()
