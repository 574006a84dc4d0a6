"""A tokenizer.json, changed so that the library panics on it."""

import base64
import json
import struct


def panics_on_load(words: bytes) -> bytes:
    """Return a tokenizer whose post-processor names a special token that it does not define;
    pdserve frames a text when it loads.
    """
    tokenizer = json.loads(words)
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    return json.dumps(tokenizer).encode()


def panics_on_text(words: bytes) -> bytes:
    """Return a tokenizer that loads, and whose normalizer then reads beyond the end of its table
    at every letter after "a".
    """
    units = 4 * (ord("a") + 1)
    table = base64.b64encode(struct.pack("<I", units) + bytes(units))
    normalizer = {"type": "Precompiled", "precompiled_charsmap": table.decode()}
    return json.dumps(json.loads(words) | {"normalizer": normalizer}).encode()
