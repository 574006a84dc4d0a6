"""A tiny SentencePiece vocabulary as GGUF metadata, and its tokenizer."""

import json
from typing import Any

from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Tokenizer


def spm_metadata(**more: Any) -> dict[str, Any]:
    """Return a vocabulary of 256 bytes, letters, a few words; <s> and </s> are control tokens."""
    control = ["<unk>", "<s>", "</s>", "[INST]"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁"]
    words += ["<s", "[I", "NS", "NST", "[INST", "▁[", "▁<"]
    letters = [*"▁helowrdabc.<>/s[]INST'é日"]
    tokens = [*control, *byte_tokens, *words, *letters]
    types = [2, 3, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(i) for i in range(len(words + letters))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def spm_tokenizer(**more: Any) -> Tokenizer:
    """Return the tokenizer of `spm_metadata`, with bos before a prompt."""
    data = tokenizer_json(spm_metadata(**more))
    size = len(json.loads(data)["model"]["vocab"])
    return Tokenizer(data, TextModelInfo(size, eos_ids=(2,), bos_id=1, adds_bos=True))
