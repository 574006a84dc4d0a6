"""Tool call formats of model families, one module per format.

Each module is named after its parser, defines a ToolFamily FAMILY, and is found by discovery.
"""

import pkgutil
from functools import cache
from importlib import import_module

from pdserve.text.parsing import ToolFamily

FALLBACK = "json"  # for templates with tools that match no family
GENERIC = "generic"  # for templates without tool support


def tool_parser_names() -> tuple[str, ...]:
    """Return the names of all tool parsers without importing them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def tool_family(name: str) -> ToolFamily | None:
    """Return the family of that name, or None."""
    if name not in tool_parser_names():
        return None
    family: ToolFamily = import_module(f"{__name__}.{name}").FAMILY
    return family


def tool_family_of(template: str) -> str:
    """Return the name of a chat template's family; FALLBACK if none matches."""
    for name in tool_parser_names():
        family = tool_family(name)
        if family is not None and family.matches(template):
            return name
    return FALLBACK
