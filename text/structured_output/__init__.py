"""Compiles the structure that an answer must have (JSON schema, grammar, regex, choice)."""

from pdserve.text.structured_output.cache import StructureCache
from pdserve.text.structured_output.schemas import without_annotations
