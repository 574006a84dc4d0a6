"""One option of the command line, derived from a dataclass field.

The field is the only definition of an option: its flag, environment variable, YAML key, bounds and
help all derive from it.
"""

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pdserve.services.common.options import ServerSettings

ENV_PREFIX = "PDSERVE_"
TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")


class OptionError(Exception):
    """An option is unknown, malformed, out of range or contradicts another. Names the flag."""


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
