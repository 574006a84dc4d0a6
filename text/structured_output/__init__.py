"""Structured outputs: converts the JSON schema, regular expression, list of choices or grammar that
a request prescribes for its answer to a grammar, which decode workers enforce
(engine/constraints)."""

from pdserve.text.structured_output.cache import StructureCache
from pdserve.text.structured_output.schemas import without_annotations
