"""Print docs/flags.md, generated from the settings.

`make docs` writes the page, tests/test_docs.py compares it.
"""

from collections.abc import Iterator

from pdserve.cli.commands import COMMANDS
from pdserve.cli.options.options import Option

HEAD = """\
# Flags

`make docs` writes this page from the code; [options.md](options.md) says where values come from. A
flag that is on or off has an opposite, as `--history` and `--no-history`. `pdserve COMMAND --help`
shows those of one command.
Every command that has options takes `--config FILE` (`PDSERVE_CONFIG`), too.
"""
KINDS = {str: "text", int: "whole number", float: "number", bool: "on or off"}


def commands() -> dict[tuple[str, str, str], tuple[Option, list[str]]]:
    """Every option with the commands that have it; an option that differs between commands is
    listed more than once."""
    found: dict[tuple[str, str, str], tuple[Option, list[str]]] = {}
    for command in COMMANDS.values():
        seen = set()
        for section in command.sections():
            for option in section.options:
                if option.name not in seen:
                    seen.add(option.name)
                    key = (option.name, _value(option), option.help)
                    found.setdefault(key, (option, []))[1].append(command.name)
    return found


def _value(option: Option) -> str:
    """The value of an option, and its default."""
    kind = ", ".join(f"`{choice}`" for choice in option.choices) or KINDS[option.kind]
    low, high = option.min, option.max
    kind += "" if low is None else f" from {low:g}"
    kind += "" if high is None else f" to {high:g}"
    kind += "; repeatable" if option.repeated else ""
    default = option.default
    if option.kind is bool:
        return f"{kind}; {'on' if default else 'off'}"
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f"{kind}; `{default}`" if default != "" else kind


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    yield "| flag | variable | value; default | of `pdserve` | |"
    yield "|---|---|---|---|---|"
    for (_, value, text), (option, names) in sorted(commands().items()):
        cells = (f"`{option.flag}`", f"`{option.env}`", value, ", ".join(names), text)
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
