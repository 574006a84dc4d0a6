"""Derives options from dataclass fields, and resolves their values from all sources (flags override
environment variables, which override the YAML file and the defaults).

The field is the only definition of an option: its flag, environment variable, YAML key, bounds and
help all derive from it. Every value records its source. A name that no command has is an error, so
a typo never silently selects a default. Options of other commands are allowed in the environment
and in the file, so that one of each can serve all processes of a deployment.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
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
    """Raised if an option is unknown, malformed, out of range or contradicts another one. The
    message names the option's flag."""


class CommandError(Exception):
    """Raised if a command cannot continue; its message is printed. `advice` is text for the user to
    print after the message, with a leading line break, or empty."""

    advice = ""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command. `name` is its YAML key, from which its flag and its environment
    variable derive.

    `field` is the name of the dataclass field that the option sets; the value of a `repeated`
    option is a tuple.
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
        """Parse the text of one value from a flag or an environment variable, and check it. Raises
        OptionError if it is malformed or not allowed."""
        try:
            if self.kind is bool:
                return _parse_bool(text)
            return self.check(self.kind(text), source)
        except ValueError:
            raise self.wrong(source, f"{text!r} is not {_NOUNS[self.kind]}") from None

    def accept(self, value: Any, source: str) -> Any:
        """Check a value that already has a type, as from a YAML file, and return it. Raises
        OptionError if it has the wrong type or is not allowed."""
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
        """Return the value if it is within the option's bounds and one of its choices. Raises
        OptionError otherwise; `source` says in the message where the value comes from."""
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
    """Return the options that derive from a settings dataclass, in the order of its fields, without
    the fields in `skip`. Options that all services have come last.

    A field without help text is not an option: code sets its value.
    """
    hints, option_fields = get_type_hints(cls), [f for f in fields(cls) if "help" in f.metadata]
    shared = {f.name for f in fields(ServerSettings)}
    option_fields.sort(key=lambda f: f.name in shared)
    return [_option(f, hints[f.name]) for f in option_fields if f.name not in skip]


def _option(item: "Field[Any]", hint: Any) -> Option:
    if get_origin(hint) in (Union, UnionType):
        raise TypeError(f"option {item.name}: the type of its field is a union, not one type")
    repeated = get_origin(hint) is tuple
    kind = get_args(hint)[0] if repeated else hint
    if kind not in _NOUNS:
        raise TypeError(f"option {item.name}: fields of type {kind} are not supported")
    if item.default is MISSING:
        raise TypeError(f"option {item.name}: its field has no default value")
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
    """The value of an option and its source: "flag --NAME", an environment variable, a file or
    "default"."""

    value: Any
    source: str

    @property
    def given(self) -> bool:
        return self.source != "default"


class Settings:
    """The resolved options of one command, in groups: one for each settings dataclass.
    Read-only."""

    def __init__(self, groups: Mapping[type, Sequence[Option]], values: Mapping[str, Value]):
        self._groups = groups
        self.values = values

    def build(self, cls: type[T], **fixed: Any) -> T:
        """Make an object of the settings dataclass `cls` from the resolved options. `fixed` sets
        fields that are not options of this command.

        An option that is not set has the default of this class, because classes that have an option
        in common may have different defaults. Raises OptionError if the class rejects the values.
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

    def override(self, **values: Any) -> "Settings":
        """Return these settings with other values of some options, as if flags set them."""
        changed = {name: Value(value, f"set for {name}") for name, value in values.items()}
        return Settings(self._groups, {**self.values, **changed})

    def options(self) -> list[Option]:
        """Return all options in order, each once; if several groups have an option, that of the
        first counts."""
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
    explain_key: Callable[[str, Any], str] = lambda key, value: "",
) -> Settings:
    """Determine the value of each option in `groups` from flags, environment, YAML file and
    defaults.

    `known_names` are the names of the options of all commands; `flags` are the unparsed values from
    the command line by option name. An empty environment variable counts as not set. Raises
    OptionError if a name is unknown, a value is not allowed or the file cannot be used;
    `explain_key` returns what the message says about an unknown key of the file and its value.
    """
    path = config or (Path(environ[CONFIG_ENV]) if environ.get(CONFIG_ENV) else None)
    env = _known_env(environ, known_names)
    file = _read_file(path, known_names, explain_key) if path else {}
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


def _read_file(
    path: Path, known_names: Collection[str], explain_key: Callable[[str, Any], str]
) -> dict[str, Any]:
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
    for name, value in content.items():
        if name not in known_names:
            sentence = explain_key(str(name).replace("_", "-"), value)
            hint = f": {sentence}" if sentence else _hint(str(name), known_names)
            raise OptionError(f"{path}: option {name!r} is unknown{hint}")
    return content


def _hint(name: str, known_names: Collection[str]) -> str:
    matches = get_close_matches(name, known_names, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def render(settings: Settings) -> str:
    """Format the options as text, one line each: `key: value  # source`. A secret becomes a comment
    with a mask, so that the text is valid YAML for --config and contains no secrets."""
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
