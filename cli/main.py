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

from pdserve.cli import foreign
from pdserve.cli.commands import COMMANDS, STOPPED, Command, commands_with, known_names
from pdserve.cli.options import (
    CommandError,
    OptionError,
    Settings,
    did_you_mean,
    parse,
    resolve,
)
from pdserve.cli.options.options import Option
from pdserve.services.common.process import hide_arguments

FOREIGN = ("up", "run", "prefill", "decode", "gateway")  # commands with options of other servers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's arguments); return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that a terminal lacks
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            print(overview(), end="")
            return 0
        if args[0] in ("version", "--version", "-v", "-V"):
            from importlib.metadata import version

            print(f"pdserve {version('pdserve')}")
            return 0
        if args[0] == "config":
            return config(args[1:])
        command = find(args[0], args[1:])
        settings, positionals = parse_command(command, f"pdserve {command.name}", args[1:])
        return command.run(settings, positionals)
    except OptionError as error:
        prog = (
            f"pdserve {args[0]}"
            if args and args[0] in (*COMMANDS, *foreign.COMMANDS, "config")
            else "pdserve"
        )
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
    options = [option for section in sections for option in section.options]
    if is_foreign := command.name in FOREIGN:
        args = foreign.translate(command.name, options, args)
        if command.name in ("up", "run"):
            for note in foreign.notes_on(os.environ):
                print(f"{prog}: {note}", file=sys.stderr)
    parsed = parse(
        prog,
        command.summary,
        sections,
        command.positionals,
        args,
        command.most_used,
        lambda flag: _explain(flag, options, is_foreign),
    )
    _set_from_positionals(options, parsed.flags, parsed.positionals)
    secret = {option.flag for option in options if option.secret}
    if any(arg.partition("=")[0] in secret for arg in args):
        hide_arguments((command.name, *args), secret)
    settings = resolve(
        {section.cls: section.options for section in sections},
        known_names(),
        parsed.flags,
        os.environ,
        Path(parsed.config) if parsed.config else None,
        foreign.explain_key,
    )
    return settings, parsed.positionals


def _explain(flag: str, options: Sequence[Option], is_foreign: bool) -> str:
    """Return what the error about an unknown flag says: the flag that was probably meant, or the
    commands that have it."""
    if owners := commands_with(flag):
        return f" here; it is an option of `pdserve {'`, `pdserve '.join(owners)}`"
    flags = [option.flag for option in options]
    hint = did_you_mean(flag, flags)
    return hint or did_you_mean(flag, foreign.similar_names(flags) if is_foreign else ())


def _set_from_positionals(
    options: Sequence[Option], flags: dict[str, str | list[str]], positionals: dict[str, Any]
) -> None:
    """Set each option that a positional argument of the same name gives. If a flag gives it, too,
    the argument is the first of the repeated ones. Raises OptionError if there are none."""
    for option in options:
        value = positionals.get(option.name)
        if value is None:
            continue
        if option.name not in flags:
            flags[option.name] = [value] if option.repeated else value
        elif "prompt" in positionals:
            positionals["prompt"] = [value, *positionals["prompt"]]
        else:
            raise OptionError(f"{value!r} and {option.flag} both set {option.name}: use one")


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
        find(show_args.pop(0), ())
        if show_args and not show_args[0].startswith("-")
        else COMMANDS["up"]
    )
    show_command = Command(
        command.name,
        f"show the options of `{command.name}`",
        "",
        command.section_specs,
        tuple(p for p in command.positionals if p.optional),
    )
    settings, _ = parse_command(show_command, f"pdserve config show {command.name}", show_args)
    print(render(settings), end="")
    return 0


def find(name: str, args: Sequence[str]) -> Command:
    """Return the command with this name, or with the meaning that it has for other servers; `run`
    if its arguments ask for a conversation with a model that must be loaded first. Raises
    OptionError if there is none."""
    if name.startswith("-"):
        raise OptionError(f"the command must come first, as in `pdserve up {name} ...`")
    if sentence := foreign.NO_COMMANDS.get(name):
        raise OptionError(f"there is no command {name!r}: {sentence}")
    name = foreign.COMMANDS.get(name, name)
    words = {arg.partition("=")[0] for arg in foreign.before_separator(args)}
    if (name in ("chat", "complete") and foreign.names_model(args)) or (
        name == "up" and words & {"--i", "--interactive", "--prompts"}
    ):
        name = "run"
    if name not in COMMANDS:
        close_names = get_close_matches(name, [*COMMANDS, "config", "version"], n=1)
        hint = (
            f" (did you mean {close_names[0]}?)" if close_names else "; pdserve --help lists them"
        )
        raise OptionError(f"command {name!r} is unknown{hint}")
    return COMMANDS[name]


def overview() -> str:
    """Return the text of `pdserve --help`: all commands with a summary of each."""
    rows = [(c.name, c.summary) for c in COMMANDS.values()]
    rows.append(("version", "print the version"))
    rows.append(("config show", "print the options in force and the source of each"))
    lines = [f"  {name:13}{summary}" for name, summary in rows]
    return (
        "usage: pdserve COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\n`pdserve COMMAND --help` lists a command's options; `pdserve serve` is "
        "`pdserve up`.\n"
        "Start with `pdserve run`, or with `pdserve up` and `pdserve chat` in another terminal.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
