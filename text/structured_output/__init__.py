"""Compiles the structure that a request prescribes for its answer (a JSON schema, a grammar, a
regular expression or a list of choices) to a grammar for decode workers."""

from pdserve.text.structured_output.cache import StructureCache
from pdserve.text.structured_output.schemas import without_annotations
