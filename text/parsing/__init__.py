"""Parsers of the text that a model generates: they separate the reasoning, the tool calls and the
plain text of each choice while it is streamed."""

from pdserve.text.parsing import harmony
from pdserve.text.parsing.answer_parser import AnswerParser, InlineReasoning
from pdserve.text.parsing.arguments import CallArguments, ToolSchemas
from pdserve.text.parsing.call_stream import CallStream
from pdserve.text.parsing.family import (
    CallForm,
    CallPiece,
    Calls,
    ContentParser,
    ReasoningFamily,
    ToolFamily,
    object_form,
    tagged_family,
)
from pdserve.text.parsing.harmony import HarmonyStream
from pdserve.text.parsing.json_calls import (
    bare_calls,
    calls_in_section,
    grammar_call,
    in_form_only,
    json_arguments,
    json_call,
    json_calls,
    json_list,
    listed_calls,
    object_pieces,
    streamed_call,
)
from pdserve.text.parsing.pieces import LiteralPieces, json_escaped
from pdserve.text.parsing.reader import (
    MAX_NAME_CHARS,
    MISTRAL_CALLS,
    BlockReader,
    CutOff,
    Malformed,
    Pieces,
    Reading,
)
from pdserve.text.parsing.reasoning_stream import ReasoningStream
from pdserve.text.parsing.values import MAX_VALUE_DEPTH, json_text, json_value
