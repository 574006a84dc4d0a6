"""Options derived from dataclass fields, and their values from all sources (flags > environment >
YAML file > default).

The field is the only definition of an option: its flag, environment variable, YAML key, bounds and
help all derive from it. Every value records its source. A name that no command knows is an error,
so a typo never silently becomes a default. Options of other commands are allowed, so one
environment or one file serves all processes of a deployment.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from pdserve.services.common.options import ServerSettings

ENV_PREFIX = "PDSERVE_"
CONFIG_ENV = ENV_PREFIX + "CONFIG"
MAX_FILE_BYTES = 1 << 20
T = TypeVar("T")
MASK = "********"
TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")


class OptionError(Exception):
    """An option is unknown, malformed, out of range or contradicts another. Names the flag."""


class CommandError(Exception):
    """A command cannot continue. `advice` begins with a line break, or is empty."""

    advice = ""


@dataclass(frozen=True, slots=True)
class Option:
    """An option. `name` is the YAML key; the flag and the environment variable derive from it.

    `field` is the dataclass field that the option fills; a `repeated` option holds a tuple.
    """

    name: str
    field: str
    kind: type
    repeated: bool
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str, source: str) -> Any:
        """Parse one value from a flag or the environment. Raises OptionError."""
        try:
            if self.kind is bool:
                return _parse_bool(text)
            return self.check(self.kind(text), source)
        except ValueError:
            raise self.wrong(source, f"{text!r} is not {_NOUNS[self.kind]}") from None

    def accept(self, value: Any, source: str) -> Any:
        """Check a typed value, for example from a YAML file, and return it. Raises OptionError."""
        if self.repeated:
            items = value if isinstance(value, list) else [value]
            return tuple(self._accept_one(item, source) for item in items)
        return self._accept_one(value, source)

    def _accept_one(self, value: Any, source: str) -> Any:
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise self.wrong(source, f"{value!r} is not {_NOUNS[self.kind]}")
        return self.check(value, source)

    def check(self, value: Any, source: str) -> Any:
        """Return the value if it is within its bounds and choices. Raises OptionError."""
        if self.choices and value not in self.choices:
            raise self.wrong(source, f"{value!r} is not one of {', '.join(self.choices)}")
        if self.min is not None and not value >= self.min:
            raise self.wrong(source, f"{value:g} is below {self.min:g}")
        if self.max is not None and not value <= self.max:
            raise self.wrong(source, f"{value:g} is above {self.max:g}")
        if value != value:
            raise self.wrong(source, "NaN is not a number")
        return value

    def wrong(self, source: str, reason: str) -> OptionError:
        origin = "" if source == self.flag else f" (from {source})"
        return OptionError(
            f"{self.flag}{origin}: {'the value is invalid' if self.secret else reason}"
        )


_NOUNS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _parse_bool(text: str) -> bool:
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise ValueError(text)


def options_of(cls: type, skip: Sequence[str] = ()) -> list[Option]:
    """Return the options of a settings dataclass in field order, without the fields in `skip`;
    options that all processes share come last.

    A field without help is not an option: code sets its value.
    """
    hints, option_fields = get_type_hints(cls), [f for f in fields(cls) if "help" in f.metadata]
    shared = {f.name for f in fields(ServerSettings)}
    option_fields.sort(key=lambda f: f.name in shared)
    return [_option(f, hints[f.name]) for f in option_fields if f.name not in skip]


def _option(item: "Field[Any]", hint: Any) -> Option:
    if get_origin(hint) in (Union, UnionType):
        raise TypeError(f"option {item.name}: unions are not supported")
    repeated = get_origin(hint) is tuple
    kind = get_args(hint)[0] if repeated else hint
    if kind not in _NOUNS:
        raise TypeError(f"option {item.name}: {kind} is not supported")
    if item.default is MISSING:
        raise TypeError(f"option {item.name} has no default")
    meta = item.metadata
    flag = meta.get("flag") or "--" + item.name.replace("_", "-")
    return Option(
        name=flag.removeprefix("--").replace("-", "_"),
        field=item.name,
        kind=kind,
        repeated=repeated,
        default=item.default,
        help=meta["help"],
        choices=tuple(meta.get("choices", ())),
        min=meta.get("min"),
        max=meta.get("max"),
        secret=meta.get("secret", False),
    )


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
    """Return one line per option: `key: value  # source`. The line of a secret is a comment with a
    mask, so that the text stays loadable and contains no secret."""
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
