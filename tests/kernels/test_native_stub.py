"""The type stub of the compiled kernels agrees with the extension's signatures.

nanobind keeps every signature. Names, kinds, defaults and plain types of parameters are compared;
the stub describes other types, such as arrays, in more detail.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.kernels import _native

STUB = ast.parse((Path(__file__).parents[2] / "kernels" / "_native.pyi").read_text())
PLAIN = {"int", "float", "bool", "str", "None"}


def declared(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from declared(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def built(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if isinstance(value, type):
            yield from built(value, f"{name}.")
        elif hasattr(value, "__nb_signature__") or isinstance(value, property | staticmethod):
            yield prefix + name, value


def parsed(value: Any) -> ast.FunctionDef:
    """Return the signature that nanobind gives a function or a property's getter."""
    function = getattr(value, "__func__", getattr(value, "fget", value))
    text, _, *defaults = function.__nb_signature__[0]
    text = re.sub(r"(numpy\.)?ndarray\[[^\]]*\]", "Array", text)
    for index, default in enumerate(defaults[0] or () if defaults else ()):
        plain = default is None or isinstance(default, int | float | str)
        text = text.replace(f"\\{index}", repr(default) if plain else "...", 1)
    text = re.sub(r"^def .*?\(", "def f(", text)
    (node,) = ast.parse(f"{text}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return node


def type_of(annotation: ast.expr | None) -> str:
    text = "" if annotation is None else ast.unparse(annotation)
    return text if text in ("", *PLAIN) else "other"


def shape(node: ast.FunctionDef) -> list[tuple[str, str, str, str]]:
    """Return kind, name, type and default of each parameter, and the return type."""
    args = node.args
    places = args.posonlyargs + args.args
    defaults = [None] * (len(places) - len(args.defaults)) + list(args.defaults)
    found = [("place", arg, default) for arg, default in zip(places, defaults, strict=True)]
    found += [
        ("name", arg, default)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return [
        (kind, arg.arg, type_of(arg.annotation), "" if default is None else ast.unparse(default))
        for kind, arg, default in found
    ] + [("return", "", type_of(node.returns), "")]


def test_the_stub_matches_the_extension(subtests: pytest.Subtests) -> None:
    functions = dict(built(_native))
    assert sorted(name for name, _ in declared(STUB.body)) == sorted(functions)
    for name, node in declared(STUB.body):
        with subtests.test(name):
            assert shape(node) == shape(parsed(functions[name]))
