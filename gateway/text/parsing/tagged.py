"""Makes tool families whose calls are between two tags, in JSON or Python notation; pure."""

from collections.abc import Callable, Mapping

from pdserve.gateway.text.parsing.arguments import ToolSchemas
from pdserve.gateway.text.parsing.family import (
    CallForm,
    Calls,
    ToolFamily,
    json_calls,
)
from pdserve.gateway.text.parsing.pythonic import listed_calls
from pdserve.gateway.text.parsing.reader import BlockReader

Matches = Callable[[str], bool]


def json_between(
    name: str,
    tags: Mapping[str, str],
    matches: Matches,
    *,
    key: str = "name",
    arguments: str = "arguments",
) -> ToolFamily:
    """Return a family whose calls are a sequence or list of JSON objects.

    `tags`: end tags by begin tag of a block; the first pair is used to write calls. `key` and
    `arguments`: the model's names of these fields.
    """

    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        yield from json_calls(reader, schemas)
        yield from reader.space()
        yield from reader.take_end(tags[opener])

    begin, end = next(iter(tags.items()))
    form = CallForm(f'{begin}[{{"{key}": "NAME", "{arguments}": ', f"}}]{end}", trigger=begin)
    special = (*tags, *tags.values())
    return ToolFamily(name, matches, form, tuple(tags), read=read, special=special)


def python_between(
    name: str, tags: Mapping[str, str], matches: Matches, *, bare: str = ""
) -> ToolFamily:
    """Return a family whose calls are a sequence or list of Python calls or JSON objects. `tags` as
    for `json_between`, `bare` as for ToolFamily. Under a grammar, calls are JSON."""
    begin, end = next(iter(tags.items()))

    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        yield from listed_calls(reader, schemas, bare=not opener)
        yield from reader.take_end(tags.get(opener, end))

    form = CallForm(f'{begin}{{"name": "NAME", "arguments": ', f"}}{end}", trigger=begin)
    special = (*tags, *tags.values())
    return ToolFamily(name, matches, form, tuple(tags), bare, read=read, special=special)
