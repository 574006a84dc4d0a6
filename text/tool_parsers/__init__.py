"""The tool call formats of model families, with one module for each kind of syntax.

Each module lists its families in FAMILIES; all modules of this folder are found automatically.
"""

import pkgutil
from functools import cache
from importlib import import_module

from pdserve.text.parsing import ToolFamily

FALLBACK_PARSER = "json"  # for templates with tools that match no family
GENERIC_PARSER = "generic"  # for templates without tool support


@cache
def _families() -> dict[str, ToolFamily]:
    """Return all families by name, in order of their names."""
    modules = (
        import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    )
    families = (family for module in modules for family in module.FAMILIES)
    return {family.name: family for family in sorted(families, key=lambda family: family.name)}


def tool_parser_names() -> tuple[str, ...]:
    """Return the names of all tool parsers (one per family), sorted."""
    return tuple(_families())


def tool_family(name: str) -> ToolFamily | None:
    """Return the family of that name; None if there is no such family."""
    return _families().get(name)


def tool_family_of(template: str) -> str:
    """Return the name of the family to which a chat template belongs, by its source;
    FALLBACK_PARSER if it matches none."""
    return next(
        (name for name, family in _families().items() if family.matches(template)), FALLBACK_PARSER
    )
