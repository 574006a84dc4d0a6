"""Tokenizers for the tests: the shipped model's, and a tiny SentencePiece one."""

from typing import Any

import pytest
from builders.shipped_tokenizer import shipped_json, shipped_library, shipped_metadata
from builders.tiny_spm import spm_tokenizer

from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm_metadata() -> dict[str, Any]:
    return shipped_metadata()


@pytest.fixture(scope="session")
def smollm_json() -> bytes:
    return shipped_json()


@pytest.fixture(scope="session")
def smollm(smollm_json: bytes) -> Tokenizer:
    return Tokenizer(smollm_json, TextModelInfo(vocab_size=49152, eos_ids=(2,), bos_id=1))


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return spm_tokenizer()


@pytest.fixture(scope="session")
def library() -> Any:
    return shipped_library()


@pytest.fixture(scope="session")
def tokenizer(library: Any) -> Tokenizer:
    inner = library.backend_tokenizer
    ids = {name: inner.token_to_id(name) for name in ("<s>", "</s>")}
    model_info = TextModelInfo(inner.get_vocab_size(), (ids["</s>"],), ids["<s>"])
    return Tokenizer(inner.to_str().encode(), model_info)
