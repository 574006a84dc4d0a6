"""The cases of llama.cpp's tests/test-chat.cpp: a model's answer to a template's prompt, and what
a client gets from it. The C++ is parsed as far as its fluent cases need it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pdserve.text import Tool

_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\s+"
    r'|R"(?P<mark>[^\s()\\]{0,16})\((?P<raw>.*?)\)(?P=mark)"'
    r'|"(?P<string>(?:[^"\\\n]|\\.)*)"'
    r"|(?P<name>[A-Za-z_]\w*(?:::\w+)*)"
    r"|(?P<number>\d+)"
    r"|(?P<sign>'(?:[^'\\]|\\.)*'|.)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_LISTS = ("std::vector",)


class Message(NamedTuple):
    """The message parsed from an answer; name and arguments of each call."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ChatCase:
    """One case. `options`: those of the prompt, by llama.cpp's names."""

    template: str
    input: str
    expected: Message
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> list[Tool]:
        return [
            Tool(name, description, json.loads(parameters))
            for name, description, parameters in self.options.get("tools", ())
        ]


def chat_cases(source: str) -> Iterator[ChatCase]:
    """Return the cases of a source, in order. Raises ValueError for a case that cannot be
    parsed.
    """
    yield from _Reader(source).cases()


def _simple(
    content: str, reasoning: str = "", name: str = "", arguments: str = "", id: str = ""
) -> Message:
    return Message(content, reasoning, ((name, arguments),) if name or id else ())


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "simple_assist_msg": _simple,
    "message_with_tool_calls": lambda name, given: _simple("", "", name, given),
    "message_with_tool_calls_and_reasoning": lambda name, given, thought: _simple(
        "", thought, name, given
    ),
    "message_with_reasoning_and_tool_call": lambda thought, name, given: _simple(
        "", thought, name, given
    ),
    "message_with_content_and_tool_call": lambda text, name, given: _simple(text, "", name, given),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda thought, text, calls: Message(
        text, thought, tuple((name, given) for name, given in calls)
    ),
    "std::string": str,
}


class _Token(NamedTuple):
    kind: str  # raw, string, name, number or sign
    text: str


class _Reader:
    def __init__(self, source: str) -> None:
        self._tokens = [*_tokens(source)]
        self._at = 0
        self._values: dict[str, Any] = {}  # of variables
        self._template_lists: dict[str, list[str]] = {}  # of loops, by variable

    def cases(self) -> Iterator[ChatCase]:
        """Return the cases. Variables keep the last value that the text gives them, as its blocks
        do.
        """
        templates: dict[str, list[str]] = {}  # by tester
        shared: dict[str, list[ChatCase]] = {}  # of functions, which loops call
        function = ""
        while self._at < len(self._tokens):
            match self._texts(5):
                case ("static", "void", name, "(", _):
                    function = name
                case (name, "(", path, ",", _) if name in shared and path in self._template_lists:
                    for template in self._template_lists[path]:
                        for one in shared[name]:
                            yield replace(one, template=template)
                case ("for", "(", "const", "auto" | "char", _):
                    self._loop()
                case (("common_chat_tool" | "common_chat_msg" | "string"), name, ("=" | "{"), *_):
                    self._variable(name)
                case (("std::string" | "char"), name, "=", *_) | ("auto", name, "=", *_):
                    self._variable(name)
                case ("*", name, "=", *_):
                    self._variable(name)
                case (tester, ".", "test", "(", _) if tester in templates:
                    one = self._case()
                    paths = templates[tester]
                    if not paths:
                        shared.setdefault(function, []).append(one)
                    for template in paths:
                        yield replace(one, template=template)
                    continue
                case _:
                    pass
            if self._texts(4)[1:] == ("=", "peg_tester", "("):
                tester = self._tokens[self._at]
                path = self._tokens[self._at + 4]
                known = self._template_lists.get(path.text, [])
                templates[tester.text] = [path.text] if path.kind == "string" else known
            self._at += 1

    def _texts(self, count: int) -> tuple[str, ...]:
        tokens = self._tokens[self._at : self._at + count]
        texts = [one.text if one.kind in ("name", "sign") else f'"{one.text}' for one in tokens]
        return (*texts, *[""] * (count - len(texts)))

    def _variable(self, name: str) -> None:
        """Store a variable if its value is one that cases use."""
        start = self._at
        while self._tokens[self._at].text != name:
            self._at += 1
        self._at += 1
        if self._tokens[self._at].text == "=":
            self._at += 1
        with suppress(ValueError, KeyError, IndexError, TypeError):
            self._values[name] = self._expression()
        self._at = start

    def _loop(self) -> None:
        """Parse a loop over paths of templates, or another one."""
        start = self._at
        while self._tokens[self._at].text not in (":", ";"):
            self._at += 1
        name = self._tokens[self._at - 1].text
        self._at += 1
        if self._tokens[self._at].text == "{":
            paths = self._expression()
            self._template_lists[name] = [str(path) for path in paths]
        self._at = start

    def _case(self) -> ChatCase:
        self._at += 3
        [text] = self._arguments("(", ")")
        options: dict[str, Any] = {}
        while self._tokens[self._at].text == ".":
            name = self._tokens[self._at + 1].text
            self._at += 2
            given = self._arguments("(", ")")
            options[name] = given[0] if given else True
        assert "run" in options
        expected = options.pop("expect", Message())
        if not isinstance(expected, Message):
            raise ValueError(f"{expected} in the case of {text}")
        expected = Message(
            options.pop("expect_content", expected.content),
            options.pop("expect_reasoning", expected.reasoning),
            tuple(
                (name, given) for name, given, *_ in options.pop("expect_tool_calls", ())
            ) or expected.calls,
        )  # fmt: skip
        return ChatCase("", text, expected, options)

    def _arguments(self, begin: str, end: str) -> list[Any]:
        assert self._tokens[self._at].text == begin
        self._at += 1
        made = []
        while self._tokens[self._at] != _Token("sign", end):
            made.append(self._expression())
            if self._tokens[self._at].text == ",":
                self._at += 1
            elif self._tokens[self._at].text != end:
                raise ValueError(f"{self._tokens[self._at - 3 : self._at + 4]}")
        self._at += 1
        return made

    def _expression(self) -> Any:
        value = self._term()
        while self._tokens[self._at] == _Token("sign", "+"):
            self._at += 1
            value += self._term()
        return value

    def _term(self) -> Any:
        token = self._tokens[self._at]
        if token == _Token("sign", "{"):
            return self._arguments("{", "}")
        self._at += 1
        if token.kind == "string":
            text = token.text
            while self._tokens[self._at].kind == "string":
                text += self._tokens[self._at].text
                self._at += 1
            return text
        if token.kind == "number":
            return int(token.text)
        if token.kind != "name":
            raise ValueError(f"{token}")
        following = self._tokens[self._at]
        if following == _Token("sign", "("):
            return _FUNCTIONS[token.text](*self._arguments("(", ")"))
        if token.text in _LISTS or following == _Token("sign", "{"):
            return self._arguments("{", "}")
        return {"true": True, "false": False}.get(
            token.text, self._values.get(token.text, token.text)
        )


def _tokens(source: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(source):
        match found.lastgroup:
            case "raw":
                yield _Token("string", found["raw"])
            case "string":
                yield _Token("string", _unescaped(found["string"]))
            case ("name" | "number" | "sign") as kind:
                yield _Token(kind, found[kind])


def _unescaped(text: str) -> str:
    """Return the text of a literal; bytes written as \\x are UTF-8."""
    made = _ESCAPE.sub(
        lambda m: chr(int(m[1][1:], 16)) if len(m[1]) > 1 else _ESCAPED.get(m[1], m[1]),
        text,
    )
    return made.encode("latin1").decode() if "\\x" in text else made
