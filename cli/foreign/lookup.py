"""Finds the entry of a foreign name in the table, and explains names in the environment and in
configuration files. Pure.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import translate
from functools import cache
from typing import Any

from pdserve.cli.foreign.entries import Entry, Implied, Lacking, Renamed, Sampling
from pdserve.cli.foreign.table import TABLE
from pdserve.cli.options import OptionError

SECRET = ("KEY", "TOKEN")
# Of variables; others, such as RUST_LOG, may be meant for other programs.
PREFIXES = ("OLLAMA_", "VLLM_", "LLAMA_", "CANDLE_VLLM_")


@cache
def _exact() -> dict[str, list[Entry]]:
    entries: dict[str, list[Entry]] = {}
    for entry in TABLE:
        for name in entry.names:
            entries.setdefault(name, []).append(entry)
    return entries


@cache
def _patterns() -> list[tuple[re.Pattern[str], Lacking]]:
    patterns = []
    for entry in TABLE:
        parts = [translate(name) for name in entry.names if set("*?") & set(name)]
        if isinstance(entry, Lacking) and parts:
            patterns.append((re.compile("|".join(parts)), entry))
    return patterns


def find_entry(name: str, command: str = "up") -> Entry | None:
    """Return the entry of a flag, an environment variable or a word for a command; None if the
    table has none. A flag may have underscores, a key after a dot (--config.mode=3), or be the
    negative form (--no-x) of one in the table."""
    for entry in _exact().get(name, ()):
        limit = entry.commands if isinstance(entry, Renamed | Implied) else ()
        if not limit or command in limit:
            return entry
    for pattern, lacking in _patterns():
        if pattern.match(name):
            return lacking
    plain = name.partition(".")[0].replace("_", "-") if name.startswith("--") else name
    if plain != name:
        return find_entry(plain, command)
    if name.startswith("--no-"):
        positive = find_entry("--" + name.removeprefix("--no-"), command)
        if isinstance(positive, Implied):
            return Lacking((name,), f"this cannot be turned off: {positive.because}")
        return positive if isinstance(positive, Lacking) else None
    return None


def similar_names(flags: Collection[str]) -> list[str]:
    """Return the foreign names that mean one of these flags, as candidates for a mistyped
    one."""
    return [
        name
        for entry in TABLE
        if isinstance(entry, Renamed) and entry.flag in flags
        for name in entry.names
        if name.startswith("--")
    ]


def explain_key(key: str, value: Any) -> str:
    """Return the sentence about a key of another server in a configuration file; empty if the table
    does not have it."""
    entry = find_entry(key) or find_entry(f"--{key}")
    if isinstance(entry, Lacking):
        nested = value if isinstance(value, dict) else {}
        hints = [f"{name} is {own}" for name in nested if (own := _own_key(str(name)))]
        return entry.sentence + (f"; {', '.join(hints)}" if hints else "")
    if isinstance(entry, Implied):
        return f"leave the key out: {entry.because}"
    if isinstance(entry, Renamed):
        try:
            entry.translate(key, str(value))
        except OptionError as error:
            return str(error)
    own = _own_key(key)
    return f"the key is {own}" if own else "leave the key out" if entry else ""


def _own_key(key: str) -> str:
    """Return the key of pdserve that means the same as a key of another server; empty if there is
    none."""
    entry = find_entry(f"--{key}")
    if isinstance(entry, Sampling):
        return "override_generation_config"
    flag = entry.flag if isinstance(entry, Renamed) else ""
    return flag.removeprefix("--").replace("-", "_")


def notes_on(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each variable of another server that is set, since pdserve does not read it:
    the flag to pass instead, or why there is none."""
    for name, value in sorted(environ.items()):
        entry = find_entry(name) if name.startswith(PREFIXES) and value else None
        is_secret = any(word in name for word in SECRET)
        try:
            if isinstance(entry, Renamed):
                flags = [entry.flag, "..."] if is_secret else entry.translate(name, value)
                if flags:
                    yield f"{name} is not read by pdserve; pass {' '.join(flags)}"
            elif isinstance(entry, Lacking):
                yield f"{name} is not read by pdserve: {entry.sentence}"
        except OptionError as error:
            yield f"{name} is not read by pdserve: {error}"
