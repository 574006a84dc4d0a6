"""Removes secrets from a report: values of secret options from any source, and users, passwords and
queries in URLs."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from pdserve.services.cli.commands import COMMANDS, known_names
from pdserve.services.options.options import ENV_PREFIX, OptionError
from pdserve.services.options.show import MASK
from pdserve.services.options.sources import Settings, resolve

MIN_SECRET_CHARS = 4  # shorter values occur by chance
MIN_GUESSED_CHARS = 12  # for variables that only look like secrets
_NAMES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|HEADERS", re.IGNORECASE)
_USER = re.compile(rb"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@")
_QUERY = re.compile(rb"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]+\?)[^\s'\"]+")
_KEYS = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.S)


class Secrets:
    """The secret values of this command, its environment, and the file of options."""

    def __init__(self, environ: Mapping[str, str], settings: Settings) -> None:
        values = {*_of_variables(environ), *_of_settings(settings)}
        for command in COMMANDS.values():
            groups = {section.cls: section.options for section in command.sections()}
            with suppress(OptionError):  # the report names the error; variables are still known
                values |= {*_of_settings(resolve(groups, known_names(), {}, environ, None))}
        values |= {password for value in values if (password := _password_of(value))}
        longest_first = sorted(values, key=len, reverse=True)
        self._values = [value.encode() for value in longest_first if len(value) >= MIN_SECRET_CHARS]

    def hide(self, data: bytes) -> bytes:
        """The data with secrets masked."""
        mask = MASK.encode()
        for value in self._values:
            data = data.replace(value, mask)
        data = _KEYS.sub(mask, data)
        data = _USER.sub(rb"\1" + mask + b"@", data)
        return _QUERY.sub(rb"\1" + mask, data)


def _of_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Secret values of variables, including those of other programs whose names suggest a
    secret."""
    sections = (section for command in COMMANDS.values() for section in command.sections())
    secret = {option.env for section in sections for option in section.options if option.secret}
    for name, value in environ.items():
        if name in secret:
            yield from (value, *(part.strip() for part in value.split(",")))
        elif _NAMES.search(name) and not name.startswith(ENV_PREFIX):
            candidates = (value, *re.split("[,=]", value))  # for headers: name=value,name=value
            yield from (
                candidate for candidate in candidates if len(candidate) >= MIN_GUESSED_CHARS
            )


def _password_of(value: str) -> str:
    """The password of a URL, since logs may contain it alone."""
    try:
        return urlsplit(value).password or ""
    except ValueError:  # not a URL
        return ""


def _of_settings(settings: Settings) -> Iterator[str]:
    for option in settings.options():
        setting = settings.values[option.name]
        if option.secret and setting.given:
            yield from setting.value if isinstance(setting.value, tuple) else (str(setting.value),)
