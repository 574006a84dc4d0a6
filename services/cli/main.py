"""The entry point of `pdserve`: finds the command, resolves its options, runs it.

Exit codes: 0 done, 1 the command failed, 2 the command line is wrong, 130 Ctrl-C ended it.
"""

import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pdserve.services.cli.commands import COMMANDS, STOPPED, Command, known_names
from pdserve.services.host.process import hide_arguments
from pdserve.services.options.aliases import translate
from pdserve.services.options.options import OptionError
from pdserve.services.options.parser import parse
from pdserve.services.options.sources import Settings, resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: sys.argv's); return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that a terminal lacks
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(overview(), end="")
            return 0
        if words[0] == "--version":
            from importlib.metadata import version

            print(f"pdserve {version('pdserve')}")
            return 0
        if words[0] == "config":
            return config(words[1:])
        command = find(words[0])
        settings, positionals = settle(command, f"pdserve {command.name}", words[1:])
        return command.run(settings, positionals)
    except OptionError as error:
        prog = f"pdserve {words[0]}" if words and words[0] in (*COMMANDS, "config") else "pdserve"
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        # The reader of the output has closed it (`| head`), so nothing can be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def settle(command: Command, prog: str, words: Sequence[str]) -> tuple[Settings, dict[str, Any]]:
    """The command's options from all sources, and its positionals."""
    sections = command.sections()
    flags = {option.flag for section in sections for option in section.options}
    words = translate(command.name, flags, words)
    found = parse(prog, command.summary, sections, command.positionals, words)
    secret = {option.flag for section in sections for option in section.options if option.secret}
    if any(word.partition("=")[0] in secret for word in words):
        hide_arguments((command.name, *words), secret)
    settings = resolve(
        {section.cls: section.options for section in sections},
        known_names(),
        found.flags,
        os.environ,
        Path(found.config) if found.config else None,
    )
    return settings, found.positionals


def config(words: Sequence[str]) -> int:
    """Run `pdserve config show [COMMAND] [its options]`."""
    from pdserve.services.options.show import render

    if not words or words[0] in ("-h", "--help"):
        print("usage: pdserve config show [command] [options of the command, default: up]")
        return 0
    if words[0] != "show":
        raise OptionError(f"{words[0]!r} is unknown; there is only `config show`")
    rest = list(words[1:])
    command = find(rest.pop(0)) if rest and not rest[0].startswith("-") else COMMANDS["up"]
    shown = Command(
        command.name, f"show the options of `{command.name}`", "", command.section_specs
    )
    settings, _ = settle(shown, f"pdserve config show {command.name}", rest)
    print(render(settings), end="")
    return 0


def find(name: str) -> Command:
    """The command of that name. Raises OptionError if there is none."""
    if name.startswith("-"):
        raise OptionError(f"a command comes first, as in `pdserve up {name} ...`")
    if name not in COMMANDS:
        close = get_close_matches(name, [*COMMANDS, "config"], n=1)
        hint = f" (did you mean {close[0]}?)" if close else "; pdserve --help lists them"
        raise OptionError(f"command {name!r} is unknown{hint}")
    return COMMANDS[name]


def overview() -> str:
    """The text of `pdserve --help`."""
    rows = [(c.name, c.summary) for c in COMMANDS.values()]
    rows.append(("config show", "print the options in force and where each came from"))
    lines = [f"  {name:13}{summary}" for name, summary in rows]
    return (
        "usage: pdserve COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\n`pdserve COMMAND --help` explains its options, `pdserve --version` itself.\n"
        "Start with `pdserve up`, then `pdserve chat` in another terminal.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
