"""Translates the options of other servers on a command line to those of pdserve, before the line is
parsed, so that all other code knows one name per option. Pure.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from pdserve.cli.foreign.entries import OFF, ON, Entry, Implied, Lacking, Renamed, Sampling
from pdserve.cli.foreign.lookup import find_entry
from pdserve.cli.foreign.table import ARCHITECTURES
from pdserve.cli.options import OptionError, after_separator
from pdserve.cli.options.options import Option

OVERRIDE = "--override-generation-config"
FILES = ("--f", "--weight-file", "-hff", "--hf-file")  # name a file in a repository, or a path
REPOSITORIES = ("--m", "--model-id", "-hf", "-hfr", "--hf-repo", "--model")
SWITCHES = (*ON, *OFF, "auto")


def names_model(arguments: Sequence[str]) -> bool:
    """Return whether a command line loads a model by a flag of another server."""
    words = before_separator(arguments)
    entries = (find_entry(word.partition("=")[0]) for word in words if word[:1] == "-")
    return any(isinstance(entry, Renamed) and entry.flag == "--model" for entry in entries)


def before_separator(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line before `--`, after which no word is an option."""
    return list(takewhile(lambda word: word != "--", arguments))


def translate(command: str, options: Sequence[Option], arguments: Sequence[str]) -> list[str]:
    """Replace foreign options in a command line by the flags of `command`, whose options are
    `options`. What is neither foreign nor an option of the command stays as it is.

    Raises OptionError for an option or a value that has no equivalent in pdserve; the message says
    what to use instead.
    """
    line = _Line(command, options)
    line.read(arguments)
    return line.result()


class _Line:
    """A command line in translation."""

    def __init__(self, command: str, options: Sequence[Option]) -> None:
        self._command = command
        self._with_value = {o.flag for o in options if o.kind is not bool or o.repeated}
        bare = {o.flag for o in options} - self._with_value
        self._bare = {*bare, *("--no-" + flag[2:] for flag in bare), "-h", "--help"}
        self._repeated = {o.flag for o in options if o.repeated}
        self._words: list[str] = []
        self._tail: list[str] = []  # `--` and the words after it
        self._free: list[int] = []  # indexes in _words of positional arguments
        self._models: dict[str, str] = {}  # foreign name -> value
        self._revision = ""
        self._sampling: dict[str, Any] = {}
        self._given: dict[str, tuple[str, str]] = {}  # flag -> the foreign name, and the value

    def read(self, arguments: Sequence[str]) -> None:
        remaining = list(arguments)
        while remaining:
            word = remaining.pop(0)
            if word == "--":
                self._tail = [word, *remaining]
                after = remaining[0] if remaining else ""
                flag = after.partition("=")[0]
                if flag[:1] == "-" and " " not in after and find_entry(flag, self._command):
                    raise after_separator(flag)
                return
            name, equals, value = word.partition("=")
            entry = find_entry(name, self._command) if word[:1] == "-" else None
            is_own = name in self._with_value or name in self._bare or name == "--config"
            if entry and (not is_own or isinstance(entry, Renamed)):
                self._take(name, entry, list(_values(name, entry, equals, value, remaining)))
                continue
            takes_value = name in self._with_value or name == "--config"
            if takes_value and equals and not _is_flag(value):  # --model=x is --model x
                self._words += [name, value]
                continue
            if word[:1] != "-":
                self._free.append(len(self._words))
            self._words.append(word)
            if takes_value and not equals and remaining:
                self._words.append(remaining.pop(0))

    def _take(self, name: str, entry: Entry, values: list[str]) -> None:
        value = " ".join(values)
        if isinstance(entry, Lacking):
            raise OptionError(f"{name}: {entry.sentence}")
        if isinstance(entry, Sampling):
            number = entry.parse(name, value)
            if number != entry.none:
                self._sampling[entry.key] = number
        elif isinstance(entry, Implied):
            if value.lower() in OFF:
                raise OptionError(f"{name} {value}: this cannot be turned off: {entry.because}")
        elif name == "--revision":
            self._revision = value
        elif entry.flag == "--model":
            self._models[name] = value
        else:
            self._add(name, entry.translate(name, value))

    def _add(self, name: str, flags: list[str]) -> None:
        """Append flags of pdserve that the option `name` means."""
        for flag, value in _pairs(flags):
            if flag not in self._with_value | self._bare | {"--config"}:
                raise OptionError(f"{name}: `pdserve {self._command}` has no option {flag}")
            other, previous = self._given.get(flag, (name, value))
            if previous != value and flag not in self._repeated:
                raise OptionError(
                    f"{name} {value} contradicts {other} {previous}: both are {flag} here"
                )
            if flag not in self._given or flag in self._repeated:
                self._words += [flag, value] if value else [flag]
            self._given[flag] = (name, value)

    def result(self) -> list[str]:
        self._add_model()
        if self._sampling:
            self._add_sampling()
        return self._words + self._tail

    def _add_model(self) -> None:
        files = {name: value for name, value in self._models.items() if name in FILES}
        others = {name: value for name, value in self._models.items() if name not in FILES}
        if len({*others.values()}) > 1 or len({*files.values()}) > 1:
            first, second = [*(others if len(others) > 1 else files)][:2]
            raise OptionError(f"{first} and {second} both name a model: use only one of them")
        model = next(iter((others or files).values()), "")
        if others and files:
            (name, *_), (file_name, *_) = others, files
            if name not in REPOSITORIES:
                raise OptionError(f"{name} and {file_name} both name a model: use only one of them")
            repository, tag = _split(model)
            if tag:
                raise OptionError(f"{name} and {file_name} both name a file: use only one of them")
            model = f"{_at(repository, self._revision)}:{files[file_name]}"
            self._revision = ""
        if files and not others and "--model" in self._words[:-1]:
            self._add_file(files)
        elif model:
            self._drop_architecture()
            self._add(next(iter(self._models)), ["--model", _at(model, self._revision)])
        elif self._revision:
            self._revise()
        elif "--model" in self._words:
            self._drop_architecture()

    def _add_file(self, files: dict[str, str]) -> None:
        """Add the name of a file to the repository that --model names."""
        name, file = next(iter(files.items()))
        index = self._words.index("--model") + 1
        if _split(self._words[index])[1]:
            raise OptionError(f"--model and {name} both name a file: use only one of them")
        self._words[index] = f"{_at(self._words[index], self._revision)}:{file}"

    def _drop_architecture(self) -> None:
        """Remove the word with which candle-vllm names the architecture; pdserve reads it from the
        model's files."""
        if self._command != "up":  # the word may begin a prompt
            return
        for index in self._free[:1]:
            if self._words[index] in ARCHITECTURES:
                del self._words[index]

    def _revise(self) -> None:
        """Add the revision to the model that the command line names without a foreign option."""
        index = self._words.index("--model") + 1 if "--model" in self._words else None
        index = self._free[0] if index is None and self._free else index
        if index is None or index >= len(self._words):
            raise OptionError("--revision: name the model, as in --model org/name@REVISION")
        self._words[index] = _at(self._words[index], self._revision)

    def _add_sampling(self) -> None:
        """Add the defaults of requests as one option, to which values of that option itself
        belong."""
        text = json.dumps(self._sampling)
        if OVERRIDE in self._words[:-1]:
            index = self._words.index(OVERRIDE) + 1
            try:
                text = json.dumps({**self._sampling, **json.loads(self._words[index])})
            except (ValueError, TypeError):
                return  # the option's own check names what is wrong with its value
            self._words[index] = text
        else:
            self._add("a default of requests", [OVERRIDE, text])


def _values(
    name: str, entry: Entry, equals: str, value: str, remaining: list[str]
) -> Iterator[str]:
    """Yield the values of a foreign option, and remove them from the remaining words. Raises
    OptionError if a value is missing."""
    takes = entry.takes if isinstance(entry, Renamed | Implied) else "value"
    if isinstance(entry, Lacking):
        return  # it is refused, whatever follows
    if equals:
        if takes == "nothing" and value.lower() not in (*ON, *OFF):
            raise OptionError(f"{name}: {value!r} is not true or false")
        if isinstance(entry, Implied) and takes == "optional" and value.lower() not in SWITCHES:
            raise OptionError(f"{name}: {value!r} is not on, off or auto")
        yield value
    elif takes == "optional":
        if remaining and remaining[0].lower() in SWITCHES:
            yield remaining.pop(0)
    elif takes != "nothing":
        if not remaining or (_is_flag(remaining[0]) and not _is_number(remaining[0])):
            raise OptionError(f"{name}: a value is required")
        yield remaining.pop(0)
        while takes == "several" and remaining and not _is_flag(remaining[0]):
            yield remaining.pop(0)


def _is_flag(word: str) -> bool:
    return word.startswith("-")


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdecimal()


def _at(model: str, revision: str) -> str:
    """Return the hub id of a model at a revision."""
    if not revision:
        return model
    repository, file = _split(model)
    return f"{repository}@{revision}:{file}" if file else f"{repository}@{revision}"


def _split(model: str) -> tuple[str, str]:
    """Return the repository of a model's name, with its scheme, and the file or tag after it."""
    scheme, separator, name = model.rpartition("://")
    repository, _, file = name.partition(":")
    return f"{scheme}{separator}{repository}", file


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, value) of a list of flags with their values; a flag without one has an empty
    value."""
    index = 0
    while index < len(flags):
        has_value = index + 1 < len(flags) and not flags[index + 1].startswith("--")
        yield flags[index], flags[index + 1] if has_value else ""
        index += 1 + has_value
