"""Reads tool calls in Python notation, NAME(key=value, ...), at the start of an answer or between
tags."""

from collections.abc import Callable, Mapping

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    CallForm,
    CallPiece,
    Calls,
    CutOff,
    LiteralPieces,
    Malformed,
    Pieces,
    ToolFamily,
    ToolSchemas,
    bare_calls,
    listed_calls,
    object_form,
    streamed_call,
)


def python_call(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Read one call in Python notation; print(NAME(...)) is read as the call inside. Raises CutOff,
    Malformed."""
    yield from reader.space()
    name = yield from reader.name()
    yield from reader.expect("(")
    printed = name == "print" and name not in schemas
    if printed:
        name = yield from reader.name()
        yield from reader.expect("(")
    if name not in schemas and name.removesuffix(".call") in schemas:
        name = name.removesuffix(".call")  # as Llama 3.1 calls its built-in tools
    if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
        raise Malformed
    yield from streamed_call(schemas, name, _arguments(reader))
    if printed:
        yield from reader.take_after_space(")")


def _arguments(reader: BlockReader) -> Pieces[None]:
    """Read the keyword arguments of a call up to its closing bracket, and yield them as a JSON
    object."""
    literals = LiteralPieces(reader)
    head = "{"
    while not (yield from reader.take_after_space(")")):
        yield from reader.space()
        key, _ = yield from reader.until("=", max_chars=MAX_NAME_CHARS)
        key = key.rstrip()
        if not key.isidentifier():
            raise Malformed
        yield from literals.value(f'{head}"{key}": ')
        head = ", "
        if not (yield from reader.take_after_space(",")):
            yield from reader.expect(")")
            break
    yield "}" if head == ", " else "{}"


def python_calls(reader: BlockReader, schemas: ToolSchemas, *, bare: bool = False) -> Calls:
    """Read calls in Python notation: a list in square brackets or, unless `bare`, a sequence of
    calls. Raises CutOff, Malformed."""
    if bare or (yield from reader.take_after_space("[")):
        if bare:
            yield from reader.expect_after_space("[")
        yield from listed_calls(reader, lambda: python_call(reader, schemas))
        return
    first = "_"
    while first.isidentifier():
        yield from python_call(reader, schemas)
        yield from reader.take_after_space(";", ",")
        first = yield from reader.first_after_space()


def mixed_calls(reader: BlockReader, schemas: ToolSchemas) -> Calls:
    """Read the calls at the start of an answer, in either notation: JSON objects, a list of them,
    or a list of Python calls.

    Calls in fenced code are held back until the answer ends: if other text follows, they are only
    an example and this raises Malformed. Raises CutOff, Malformed.
    """
    if not (yield from reader.take_after_space("```")):
        yield from json_or_python_calls(reader, schemas, bare=True)
        return
    calls: list[CallPiece] = []
    fenced = "```"
    try:
        while fenced:
            yield from reader.until("\n", max_chars=MAX_NAME_CHARS)
            for piece in json_or_python_calls(reader, schemas, bare=True):
                if piece is None:
                    yield None
                else:
                    calls.append(piece)
            yield from reader.take_end("```")
            fenced = yield from reader.take_after_space("```")
    except CutOff:
        if reader.cut:
            yield from calls
        raise
    if (yield from reader.first()):
        raise Malformed
    yield from calls


def json_or_python_calls(reader: BlockReader, schemas: ToolSchemas, *, bare: bool) -> Calls:
    """Read JSON objects, a list of them, or Python calls (with `bare`, only a list of these), and
    the white space after them. Raises CutOff, Malformed."""
    yield from reader.space()
    start = reader.position
    if (yield from reader.take("[")):
        yield from reader.space()
    first = yield from reader.first()
    reader.position = start
    if first == "{":
        yield from bare_calls(reader, schemas)
    else:
        yield from python_calls(reader, schemas, bare=bare)
    yield from reader.space()


def _family(
    name: str,
    tags: Mapping[str, str],
    matches: Callable[[str], bool],
    form: CallForm | None = None,
    *,
    bare: str = "",
) -> ToolFamily:
    """Return a family that writes its calls as a sequence or a list of Python calls or JSON
    objects.

    `tags` maps each begin tag of a block to its end tag. `bare`: characters that begin a block
    without a tag. `form`: how calls are written under a grammar; by default, JSON objects between
    the first pair of tags.
    """
    begin, end = next(iter(tags.items()))

    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        yield from json_or_python_calls(reader, schemas, bare=not opener)
        yield from reader.take_end(tags.get(opener, end))

    form = form or object_form(begin, end)
    special = (*tags, *tags.values())
    return ToolFamily(name, matches, form, tuple(tags), bare, read=read, special=special)


_LFM2_MARKS = "<|tool_list_start|>", "<|tool_call_start|>", "List of tools: ["
_NAMES = "tool_call", "tool_calls", "function_calls"  # of tags that several families use

FAMILIES = (
    _family(
        "lfm2",
        {"<|tool_call_start|>": "<|tool_call_end|>"},
        lambda template: any(mark in template for mark in _LFM2_MARKS),
    ),
    _family(  # Llama 4 and pythonic Llama 3.2
        "llama4_pythonic",
        {"<|python_start|>": "<|python_end|>"},
        lambda template: "<|header_start|>" in template,
        CallForm('{"name": "NAME", "parameters": ', "}", trigger='{"name": "'),
        bare="[{",
    ),
    _family(  # one call per line
        "olmo3",
        {"<function_calls>": "</function_calls>"},
        lambda template: "<function_calls>" in template,
    ),
    _family(  # unknown families
        "pythonic",
        {f"<{name}>": f"</{name}>" for name in _NAMES},
        lambda template: False,
        CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
        bare="[{",
    ),
)
