"""Parses command lines and formats help, both derived from options. argparse only splits words:
values stay text, so that flags, environment variables and YAML files are checked by the same code.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, NoReturn

from pdserve.cli.options.options import Option, OptionError


@dataclass(frozen=True, slots=True)
class Section:
    """A titled section of a command's help, with the options that derive from one settings
    dataclass."""

    title: str
    cls: type
    options: Sequence[Option]


@dataclass(frozen=True, slots=True)
class Positional:
    """A positional argument of a command: its name and its help text."""

    name: str
    help: str
    repeated: bool = False  # the value is a list
    optional: bool = False  # the value may be None, or an empty list

    @property
    def nargs(self) -> str | None:
        many, one = ("*", "?") if self.optional else ("+", None)
        return many if self.repeated else one

    @property
    def usage(self) -> str:
        if self.optional:
            return f"[{self.name}{' ...' * self.repeated}]"
        return self.name + f" [{self.name} ...]" * self.repeated


MAX_WIDTH = 100  # columns of help


class _Parser(argparse.ArgumentParser):
    @property
    def flags(self) -> Collection[str]:
        return self._option_string_actions.keys()

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


class _Formatter(argparse.HelpFormatter):
    """Formats help as wide as the terminal, but at most MAX_WIDTH columns; never breaks a line
    inside a flag."""

    def __init__(self, prog: str):
        width = min(MAX_WIDTH, get_terminal_size().columns)
        super().__init__(prog, max_help_position=30, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class Words:
    """The parts of a split command line: unparsed flag values by option name, positional arguments
    by name, and the path given by --config."""

    flags: dict[str, str | list[str]]
    positionals: dict[str, Any]  # a text, or a list of texts
    config: str | None


def parse(
    prog: str,
    description: str,
    sections: Sequence[Section],
    positionals: Sequence[Positional],
    arguments: Sequence[str],
    most_used: Sequence[str] = (),
    explain: Callable[[str], str] = lambda flag: "",
) -> Words:
    """Split a command line by the options in `sections` and the positional arguments. For --help,
    prints the help, which begins with the options that `most_used` names, and exits. Raises
    OptionError if the command line is wrong; `explain` returns what the message says about an
    unknown flag."""
    words = [p.usage for p in positionals]
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=_Formatter,
        add_help=False,
        usage=" ".join([prog, *words, *(["[options]"] if sections else [])]),
        epilog="Every option is also an environment variable (--kv-dtype: PDSERVE_KV_DTYPE, lists "
        "separated by commas) and a key of the --config file (kv_dtype). "
        "Flags override the environment, and the environment overrides the file."
        if sections
        else None,
    )
    for p in positionals:
        # Not the name, which may also be that of an option.
        parser.add_argument(_dest(p), metavar=p.name, help=p.help, nargs=p.nargs)
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="show this help and exit")
    if sections:
        general.add_argument("--config", metavar="FILE", help="YAML file with values of options")
    seen = set(most_used)
    if most_used:
        all_options = {o.name: o for s in reversed(sections) for o in s.options}
        group = parser.add_argument_group("most used")
        for name in most_used:
            _add(group, all_options[name])
    for section in sections:
        group = parser.add_argument_group(section.title)
        for option in section.options:
            if option.name not in seen:
                seen.add(option.name)
                _add(group, option)
    check_flags(prog, arguments, parser.flags, explain)
    options = [option for section in sections for option in section.options]
    values = vars(parser.parse_intermixed_args(_without_switch_values(options, arguments)))
    return Words(
        flags={name: values[name] for name in seen if name in values},
        positionals={p.name: values[_dest(p)] for p in positionals},
        config=values.get("config"),
    )


def _dest(positional: Positional) -> str:
    return f"positional {positional.name}"


def check_flags(
    prog: str, arguments: Sequence[str], flags: Collection[str], explain: Callable[[str], str]
) -> None:
    """Raise OptionError for the first word of a command line that looks like a flag but is not one
    of `flags`; the message has what `explain` returns, or else suggests a similar flag. Also raise
    it if the first word after `--` is one of `flags`, unless it is a quoted text.

    A known flag in the place of another flag's value is not reported here; argparse reports it.
    """
    for index, argument in enumerate(arguments):
        name = argument.partition("=")[0]
        if argument == "--":
            for after in arguments[index + 1 : index + 2]:
                flag = after.partition("=")[0]
                if flag in flags and " " not in after:
                    raise after_separator(flag)
            return
        stripped = argument.lstrip("-")
        is_flag = argument.startswith("-") and stripped[:1].isalpha() and " " not in name
        if not is_flag or name in flags:
            continue
        hint = explain(name) or did_you_mean(name, flags)
        hint = hint or f"; `{prog} --help` lists the options"
        raise OptionError(f"option {name} is unknown{hint}")


def after_separator(flag: str) -> OptionError:
    """Return the error for an option that follows `--`."""
    return OptionError(
        f"{flag} comes after `--`, where no word is an option; put options before `--`, or quote "
        "the whole text that begins with this word"
    )


def _without_switch_values(options: Sequence[Option], arguments: Sequence[str]) -> list[str]:
    """Replace --NAME=true and --NAME=false of boolean options, which argparse does not accept, by
    --NAME and --no-NAME. Raises OptionError for other values."""
    switches = {o.flag: o for o in options if o.kind is bool and not o.repeated}
    switches |= {_negative(o): o for o in switches.values()}
    words = list(arguments)
    for index, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if equals and name in switches:
            option = switches[name]
            is_on = option.parse(value, name) is (name == option.flag)
            words[index] = option.flag if is_on else _negative(option)
    return words


def _negative(option: Option) -> str:
    """Return the flag that turns a boolean option off."""
    return "--no-" + option.flag.removeprefix("--")


def did_you_mean(name: str, flags: Collection[str]) -> str:
    """Return the suggestion of the flag most similar to a mistyped one; empty if none is."""
    names = {flag.lstrip("-"): flag for flag in flags}  # dashes must not count as similarity
    matches = get_close_matches(name.lstrip("-"), names, n=1, cutoff=0.65)
    return f" (did you mean {names[matches[0]]}?)" if matches else ""


def _add(group: Any, option: Option) -> None:
    common: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": _help(option).replace("%", "%%"),
    }
    if option.kind is bool and not option.repeated:
        group.add_argument(option.flag, action="store_const", const="true", **common)
        common["help"] = argparse.SUPPRESS
        group.add_argument(_negative(option), action="store_const", const="false", **common)
        return
    action = "append" if option.repeated else "store"
    group.add_argument(option.flag, action=action, metavar=_metavar(option), **common)


_METAVARS = {str: "TEXT", int: "N", float: "X", bool: "true|false"}
MAX_METAVAR = 70  # characters; longer lists of choices go into the help text, which is wrapped


def _metavar(option: Option) -> str:
    choices = "{" + ",".join(option.choices) + "}"
    return choices if option.choices and len(choices) <= MAX_METAVAR else _METAVARS[option.kind]


def _help(option: Option) -> str:
    notes = []
    if option.choices and _metavar(option) == _METAVARS[option.kind]:
        notes.append(f"one of: {', '.join(option.choices)}")
    if option.repeated:
        notes.append("repeatable")
    if option.kind is bool:
        on = f"on; {_negative(option)} turns it off"
        notes.append(f"default: {on if option.default else 'off'}")
    elif option.default not in ("", ()):
        notes.append(f"default: {option.default}")
    return option.help + (f" ({'; '.join(notes)})" if notes else "")
