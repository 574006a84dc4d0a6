"""How families of models call tools: each is one module here with a ToolFamily named FAMILY, which
is found by discovery. A module has its parser's name."""

import pkgutil
from functools import cache
from importlib import import_module

from pdserve.gateway.text.parsing.family import ToolFamily

FALLBACK = "json"  # for templates that show tools in a way that no family knows
GENERIC = "generic"  # for templates that have no place for tools


def tool_parser_names() -> tuple[str, ...]:
    """Nothing is imported for it."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def tool_family(name: str) -> ToolFamily | None:
    """The family of that name, if there is one."""
    if name not in tool_parser_names():
        return None
    family: ToolFamily = import_module(f"{__name__}.{name}").FAMILY
    return family


def tool_family_of(template: str) -> str:
    """The name of the family that a chat template is of."""
    for name in tool_parser_names():
        family = tool_family(name)
        if family is not None and family.matches(template):
            return name
    return FALLBACK
