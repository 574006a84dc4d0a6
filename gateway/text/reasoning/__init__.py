"""How families of models think before they answer: each is one module here with a ReasoningFamily
named FAMILY, which is found by discovery. A module has its parser's name."""

import pkgutil
from functools import cache
from importlib import import_module

from pdserve.gateway.text.parsing.family import ReasoningFamily


def reasoning_parser_names() -> tuple[str, ...]:
    """Nothing is imported for it."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def reasoning_family(name: str) -> ReasoningFamily | None:
    """The family of that name, if there is one."""
    if name not in reasoning_parser_names():
        return None
    family: ReasoningFamily = import_module(f"{__name__}.{name}").FAMILY
    return family


def reasoning_family_of(template: str) -> str:
    """The name of the family that a chat template is of; empty: its model does not think."""
    for name in reasoning_parser_names():
        family = reasoning_family(name)
        if family is not None and family.matches(template):
            return name
    return ""
