"""Reasoning formats of model families, one module per format.

Each module is named after its parser, defines a ReasoningFamily FAMILY, and is found by discovery.
"""

import pkgutil
from functools import cache
from importlib import import_module

from pdserve.text.parsing.family import ReasoningFamily
from pdserve.text.reasoning.kimi_k3 import AROUND
from pdserve.text.reasoning.muse_glimmer import MESSAGE


def reasoning_parser_names() -> tuple[str, ...]:
    """Return the names of all reasoning parsers without importing them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def reasoning_family(name: str) -> ReasoningFamily | None:
    """Return the family of that name, or None."""
    if name not in reasoning_parser_names():
        return None
    family: ReasoningFamily = import_module(f"{__name__}.{name}").FAMILY
    return family


def reasoning_family_of(template: str) -> str:
    """Return the name of a chat template's family; empty if its model does not reason."""
    for name in reasoning_parser_names():
        family = reasoning_family(name)
        if family is not None and family.matches(template):
            return name
    return ""
