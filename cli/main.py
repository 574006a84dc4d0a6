"""The entry point of `pdserve`: finds the command, resolves its options and runs it.

Exit codes: 0 done, 1 the command failed, 2 the command line is wrong, 130 Ctrl-C ended the command.
"""

import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

if sys.platform != "linux":  # before the imports below, which fail elsewhere
    sys.exit(
        f"pdserve runs on Linux only, and this is {sys.platform}; run it in a Linux container or "
        "virtual machine."
    )

from pdserve.cli.commands import COMMANDS, STOPPED, Command, known_names
from pdserve.cli.options import CommandError, OptionError, Settings, parse, resolve, translate
from pdserve.services.common.process import hide_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's arguments); return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that a terminal lacks
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            print(overview(), end="")
            return 0
        if args[0] in ("--version", "version"):
            from importlib.metadata import version

            print(f"pdserve {version('pdserve')}")
            return 0
        if args[0] == "config":
            return config(args[1:])
        command = find(args[0])
        settings, positionals = parse_command(command, f"pdserve {command.name}", args[1:])
        return command.run(settings, positionals)
    except OptionError as error:
        prog = f"pdserve {args[0]}" if args and args[0] in (*COMMANDS, "config") else "pdserve"
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"pdserve {args[0]}: {error}{error.advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        # The reader of the output has closed it (`| head`), so nothing can be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parse_command(
    command: Command, prog: str, args: Sequence[str]
) -> tuple[Settings, dict[str, Any]]:
    """Return a command's options, from all their sources, and its positional arguments. Raises
    OptionError if the command line or an option is wrong."""
    sections = command.sections()
    flags = {option.flag for section in sections for option in section.options}
    args = translate(command.name, flags, args)
    parsed = parse(prog, command.summary, sections, command.positionals, args)
    secret = {option.flag for section in sections for option in section.options if option.secret}
    if any(arg.partition("=")[0] in secret for arg in args):
        hide_arguments((command.name, *args), secret)
    settings = resolve(
        {section.cls: section.options for section in sections},
        known_names(),
        parsed.flags,
        os.environ,
        Path(parsed.config) if parsed.config else None,
    )
    return settings, parsed.positionals


def config(args: Sequence[str]) -> int:
    """Run `pdserve config show [COMMAND] [options of the command]`: print the options in force.
    Returns the exit code."""
    from pdserve.cli.options import render

    if not args or args[0] in ("-h", "--help"):
        print("usage: pdserve config show [command] [options of the command, default: up]")
        return 0
    if args[0] != "show":
        raise OptionError(f"{args[0]!r} is unknown; the only subcommand is `config show`")
    show_args = list(args[1:])
    command = (
        find(show_args.pop(0)) if show_args and not show_args[0].startswith("-") else COMMANDS["up"]
    )
    show_command = Command(
        command.name, f"show the options of `{command.name}`", "", command.section_specs
    )
    settings, _ = parse_command(show_command, f"pdserve config show {command.name}", show_args)
    print(render(settings), end="")
    return 0


def find(name: str) -> Command:
    """Return the command with this name. Raises OptionError if there is none."""
    if name.startswith("-"):
        raise OptionError(f"the command must come first, as in `pdserve up {name} ...`")
    if name not in COMMANDS:
        close_names = get_close_matches(name, [*COMMANDS, "config"], n=1)
        hint = (
            f" (did you mean {close_names[0]}?)" if close_names else "; pdserve --help lists them"
        )
        raise OptionError(f"command {name!r} is unknown{hint}")
    return COMMANDS[name]


def overview() -> str:
    """Return the text of `pdserve --help`: all commands with a summary of each."""
    rows = [(c.name, c.summary) for c in COMMANDS.values()]
    rows.append(("config show", "print the options in force and the source of each"))
    lines = [f"  {name:13}{summary}" for name, summary in rows]
    return (
        "usage: pdserve COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\n`pdserve COMMAND --help` lists a command's options; `pdserve --version` prints the "
        "version.\n"
        "Start with `pdserve up`, then `pdserve chat` in another terminal.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
