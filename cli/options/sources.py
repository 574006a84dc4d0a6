"""Merging of option values from their sources (flags > environment > YAML file > default), and
`pdserve config show`.

Every value records its source. A name that no command knows is an error, so a typo never silently
becomes a default. Options of other commands are allowed, so one environment or one file serves all
processes of a deployment.

The output of `pdserve config show` never contains a secret: its line is a comment with a mask, so
the file stays loadable.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pdserve.cli.options.options import ENV_PREFIX, Option, OptionError

CONFIG_ENV = ENV_PREFIX + "CONFIG"
MAX_FILE_BYTES = 1 << 20
T = TypeVar("T")
MASK = "********"


@dataclass(frozen=True, slots=True)
class Value:
    """An option's value and its source: a flag, a variable, a file or "default"."""

    value: Any
    source: str

    @property
    def given(self) -> bool:
        return self.source != "default"


class Settings:
    """The resolved options of one command; read-only."""

    def __init__(self, groups: Mapping[type, Sequence[Option]], values: Mapping[str, Value]):
        self._groups = groups
        self.values = values

    def build(self, cls: type[T], **fixed: Any) -> T:
        """Build the settings object of one group; `fixed` sets fields that are not options here.

        An option without a given value takes the group's default, because groups that share an
        option may have different defaults. Raises OptionError if the class rejects the values.
        """
        field_values = {
            option.field: self.values[option.name].value
            for option in self._groups[cls]
            if self.values[option.name].given
        }
        try:
            return cls(**{**field_values, **fixed})
        except ValueError as error:
            raise OptionError(str(error)) from None

    def options(self) -> list[Option]:
        """Return every option once, in order; the first group defines a shared option."""
        merged: dict[str, Option] = {}
        for options in self._groups.values():
            for option in options:
                merged.setdefault(option.name, option)
        return list(merged.values())


def resolve(
    groups: Mapping[type, Sequence[Option]],
    known_names: Collection[str],
    flags: Mapping[str, str | list[str]],
    environ: Mapping[str, str],
    config: Path | None,
) -> Settings:
    """Merge all sources into the options of `groups`.

    `known_names` holds the option names of all commands, `flags` the raw values by option name. An
    empty environment variable counts as unset. Raises OptionError.
    """
    path = config or (Path(environ[CONFIG_ENV]) if environ.get(CONFIG_ENV) else None)
    env = _known_env(environ, known_names)
    file = _read_file(path, known_names) if path else {}
    values: dict[str, Value] = {}
    for option in Settings(groups, values).options():
        name = option.name
        if name in flags:
            values[name] = Value(
                _parse_value(option, flags[name], option.flag), f"flag {option.flag}"
            )
        elif name in env:
            raw_value: str | list[str] = (
                [item.strip() for item in env[name].split(",") if item.strip()]
                if option.repeated
                else env[name]
            )
            values[name] = Value(_parse_value(option, raw_value, option.env), option.env)
        elif name in file:
            values[name] = Value(option.accept(file[name], str(path)), str(path))
        else:
            values[name] = Value(option.default, "default")
    return Settings(groups, values)


def _parse_value(option: Option, raw_value: str | list[str], source: str) -> Any:
    if isinstance(raw_value, list):
        return tuple(option.parse(item, source) for item in raw_value)
    return option.parse(raw_value, source)


def _known_env(environ: Mapping[str, str], known_names: Collection[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_ENV:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in known_names or variable != variable.upper():
            raise OptionError(
                f"environment variable {variable} is unknown" + _hint(name, known_names)
            )
        if text:
            values[name] = text
    return values


def _read_file(path: Path, known_names: Collection[str]) -> dict[str, Any]:
    import yaml  # the import takes 20 ms, and few commands read a file

    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise OptionError(f"--config: {path} is larger than 1 MiB")
        content = yaml.safe_load(text)
    except OSError as error:
        raise OptionError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise OptionError(f"--config: {path} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config: {path} must map option names to values")
    for name in content:
        if name not in known_names:
            raise OptionError(f"{path}: option {name!r} is unknown" + _hint(str(name), known_names))
    return content


def _hint(name: str, known_names: Collection[str]) -> str:
    matches = get_close_matches(name, known_names, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def render(settings: Settings) -> str:
    """Return one line per option: `key: value  # source`."""
    pairs = []
    for option in settings.options():
        resolved = settings.values[option.name]
        if option.secret and resolved.value:
            pairs.append((f"# {option.name}: {MASK}", resolved.source))
        else:
            pairs.append((f"{option.name}: {_yaml(resolved.value)}", resolved.source))
    width = min(max(len(text) for text, _ in pairs), 48)
    return "\n".join(f"{text:{width}}  # {source}" for text, source in pairs) + "\n"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
