"""What a command line of pdserve means: its command and its options, by the real parsers."""

import json
from collections.abc import Sequence
from typing import Any

from pdserve.cli.main import find, parse_command

JSON_OPTIONS = ("override_generation_config",)


def meaning(words: Sequence[str]) -> dict[str, Any]:
    """Return the command and its options, from the words after `pdserve`. Raises OptionError."""
    command = find(words[0], words[1:])
    settings, positionals = parse_command(command, "pdserve", words[1:])
    values = {name: value.value for name, value in settings.values.items()}
    for name in JSON_OPTIONS:
        if values.get(name):
            values[name] = json.loads(values[name])
    return {"command": command.name, **positionals, **values}
