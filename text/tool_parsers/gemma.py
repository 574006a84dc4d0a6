"""Reads the tool calls of Gemma models: call:NAME{key:value}, with values in a notation like
JSON."""

from pdserve.text.parsing import (
    MAX_NAME_CHARS,
    BlockReader,
    Calls,
    LiteralPieces,
    Malformed,
    Pieces,
    Reading,
    ToolFamily,
    ToolSchemas,
    grammar_call,
    json_escaped,
    streamed_call,
    tagged_family,
)


class _GemmaPieces(LiteralPieces):
    """Reads values in Gemma's notation, in which keys have no quotes, and strings are between quote
    tokens and have no escapes."""

    def __init__(self, reader: BlockReader, quote: str) -> None:
        super().__init__(reader)
        self.quote = quote

    def _opening(self) -> Reading[str]:
        return self._reader.take(self.quote)

    def _string(self, opening: str) -> Pieces[None]:
        texts = self._reader.pieces_until(opening)
        for text in texts:
            yield None if text is None else json_escaped(text)

    def _key(self) -> Reading[str]:
        reader = self._reader
        if (yield from self._opening()):
            key, _ = yield from reader.until(self.quote, max_chars=MAX_NAME_CHARS)
            yield from reader.expect_after_space(":")
        else:
            key, mark = yield from reader.until(":", "}", max_chars=MAX_NAME_CHARS)
            key = key.strip()
            if mark != ":" or not key:
                raise Malformed
        return f'"{json_escaped(key)}"'


def _family(name: str, begin: str, end: str, quote: str) -> ToolFamily:
    def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
        if (yield from grammar_call(reader, schemas, end)):
            return
        yield from reader.expect("call:")
        name, mark = yield from reader.until("{", end, max_chars=MAX_NAME_CHARS)
        name = name.strip()
        if mark == end or not name:
            raise Malformed
        reader.position -= 1
        yield from streamed_call(schemas, name, _GemmaPieces(reader, quote).value())
        if not (yield from reader.take_end_after_space(end)):
            raise Malformed

    return tagged_family(name, begin, end, read, special=(quote,))


FAMILIES = (
    _family("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    _family("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
)
