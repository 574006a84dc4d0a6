"""The parts that tool and reasoning parsers are made of."""

from pdserve.text.parsing.answer import AnswerParser, InlineThoughts
from pdserve.text.parsing.arguments import CallArguments, ToolSchemas
from pdserve.text.parsing.family import (
    CallForm,
    CallPiece,
    Calls,
    ContentParser,
    ReasoningFamily,
    ToolFamily,
    called,
    grammar_call,
    in_form_only,
    json_arguments,
    json_call,
    json_calls,
    json_list,
    object_pieces,
)
from pdserve.text.parsing.harmony import CHANNEL, END, FINAL, MESSAGE, SPECIAL, HarmonyStream
from pdserve.text.parsing.invoke import raw_text, read_head, read_invoke, read_invokes, read_members
from pdserve.text.parsing.pieces import FunctionGemmaPieces, GemmaLiteralPieces
from pdserve.text.parsing.pythonic import json_between, mixed_calls, python_between, python_calls
from pdserve.text.parsing.reader import (
    BRACKETED,
    MAX_NAME_CHARS,
    BlockReader,
    CutOff,
    Malformed,
    Pieces,
    Reading,
)
from pdserve.text.parsing.stream import CallStream
from pdserve.text.parsing.thought import ThoughtStream, between_tags, lines_around
from pdserve.text.parsing.values import MAX_DEPTH, json_text, json_value
