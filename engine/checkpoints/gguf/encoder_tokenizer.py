"""The tokenizers of encoders in GGUF files: WordPiece (`bert`), unigram (`t5`), and the special
tokens that frame one text or a pair.

llama.cpp's converter (conversion/bert.py) defines how the files spell them. What a file leaves out
is as in the tokenizer.json that the model families publish.
"""

import base64
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pdserve.engine.checkpoints.gguf.vocabulary import (
    CONTROL,
    SPACE,
    numbers,
    token_at,
)
from pdserve.engine.checkpoints.source import CheckpointError

ENCODERS = ("bert", "modern-bert")  # values of general.architecture
_INSIDE = "##"  # begins a piece that continues a word
_MAX_WORD = 100  # characters of a word; a longer one is unknown
# A trie of SentencePiece has blocks of this many units, one for each byte that may follow.
_BLOCK = 256


def word_piece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[list[str], dict[str, Any]]:
    """Return the tokens as WordPiece spells them, and the parts of tokenizer.json of BERT. Raises
    CheckpointError if the vocabulary is not one of WordPiece."""
    spelled = [_word_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]
    is_word_piece = any(token.startswith(_INSIDE) for token in spelled)
    if not is_word_piece or any(token.startswith(SPACE) and token != SPACE for token in spelled):
        raise CheckpointError(
            "the vocabulary of GGUF tokenizer model 'bert' is not one of WordPiece: the file was "
            "made from another tokenizer, which cannot be restored"
        )
    unknown = _special_id(metadata, spelled, "[UNK]", "unknown")
    # Files mostly do not say what is done to text, but the vocabulary has nothing that it removes.
    cased = not set(string.ascii_uppercase).isdisjoint(spelled)
    lowercase = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", not cased))
    keys = (f"tokenizer.ggml.{name}" for name in ("normalizer.strip_accents", "strip_accents"))
    stated = next((metadata[key] for key in keys if key in metadata), None)
    strips = lowercase and not any(map(_has_accent, spelled)) if stated is None else bool(stated)
    return spelled, {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {
            "type": "WordPiece",
            "unk_token": spelled[unknown],
            "continuing_subword_prefix": _INSIDE,
            "max_input_chars_per_word": _MAX_WORD,
            "vocab": {token: index for index, token in enumerate(spelled)},
        },
        "decoder": {"type": "WordPiece", "prefix": _INSIDE, "cleanup": True},
    }


def _word_piece(token: str, kind: int) -> str:
    """Return WordPiece's spelling of a token. The file marks the beginnings of words and not the
    other pieces; control tokens, and in early files all names in brackets, are as they are."""
    if kind == CONTROL or (token.startswith("[") and token.endswith("]") and len(token) > 2):
        return token
    return token[1:] if token.startswith(SPACE) else _INSIDE + token


def _has_accent(token: str) -> bool:
    """Return whether BERT's normalizer removes an accent from a token: a combining character after
    decomposition."""
    return not token.isascii() and any(
        unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", token)
    )


def unigram(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Return the parts of tokenizer.json of XLM-RoBERTa. Raises CheckpointError if scores or the
    unknown token are missing, if text gets no leading space, or if the table of replaced characters
    is malformed."""
    scores = numbers(metadata, "scores", len(tokens))
    if scores is None:
        raise CheckpointError("GGUF tokenizer.ggml.scores is missing")
    if not metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise CheckpointError("GGUF tokenizer.ggml.add_space_prefix is false: expected true")
    spaces = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always",
        "split": True,
    }
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    normalizer = None
    if charsmap:
        table = _charsmap(bytes(value & 0xFF for value in charsmap))
        normalizer = {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(table).decode(),
        }
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, spaces],
        },
        "model": {
            "type": "Unigram",
            "unk_id": _special_id(metadata, tokens, "<unk>", "unknown"),
            "byte_fallback": False,
            "vocab": list(zip(tokens, scores, strict=True)),
        },
        "decoder": spaces,
    }


def _charsmap(table: bytes) -> bytes:
    """Return SentencePiece's table of replaced characters, safe for any text: the library that
    reads it does not check where its entries point. A table has the size of a trie, the trie, and
    the replacements. Raises CheckpointError if an entry points outside of it."""
    size = int.from_bytes(table[:4], "little")
    trie, replacements = table[4 : 4 + size], np.frombuffer(table[4 + size :], np.uint8)
    malformed = CheckpointError("GGUF tokenizer.ggml.precompiled_charsmap is malformed")
    if len(trie) != size or size % 4 or not size:
        raise malformed
    units = np.frombuffer(trie, "<u4").astype(np.int64)
    num_units = -(-len(units) // _BLOCK) * _BLOCK
    units = np.concatenate([units, np.zeros(num_units - len(units), np.int64)])  # no text matches 0
    # Darts-clone's layout: bit 31 marks a leaf, bit 8 a node that has one, as its first child.
    children = np.arange(num_units) ^ ((units >> 10) << ((units & (1 << 9)) >> 6))
    children = children[units >> 31 == 0]
    if units[0] >> 31 or children.max(initial=0) >= num_units:  # the root is never a leaf
        raise malformed
    parents = units[units >> 31 == 0]
    places = units[children[parents >> 8 & 1 == 1]] & ((1 << 31) - 1)
    if places.max(initial=-1) >= len(replacements) or np.any(replacements[places] & 0xC0 == 0x80):
        raise malformed
    return (4 * num_units).to_bytes(4, "little") + units.astype("<u4").tobytes() + table[4 + size :]


def encoder_frame(metadata: Mapping[str, Any], tokens: Sequence[str], kind: str) -> dict[str, Any]:
    """Return tokenizer.json's `post_processor` for an encoder's tokenizer of the `kind` that
    `tokenizer.ggml.model` names. Raises CheckpointError if the file does not name the tokens."""
    first = _special_id(metadata, tokens, "[CLS]", "cls", "bos")
    last = _special_id(metadata, tokens, "[SEP]", "seperator", "eos")  # GGUF's spelling
    is_bert = kind == "bert"
    # RoBERTa's frame has two tokens between the texts, those of BERT and ModernBERT one.
    is_single = is_bert or metadata.get("general.architecture") == "modern-bert"
    names = tokens[first], tokens[last]
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in names)
    type_id = int(is_bert)  # of the second text
    second = {"Sequence": {"id": "B", "type_id": type_id}}
    finish = {"SpecialToken": {"id": tokens[last], "type_id": type_id}}
    single = [begin, {"Sequence": {"id": "A", "type_id": 0}}, end]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *([] if is_single else [end]), second, finish],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in (first, last)
        },
    }


def _special_id(metadata: Mapping[str, Any], tokens: Sequence[str], text: str, *names: str) -> int:
    """Return the id that the first of the keys `names` gives, or else that of the token `text`.
    Raises CheckpointError if there is none."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    for key in keys:
        if (index := metadata.get(key)) is not None:
            token_at(tokens, index)  # raises if it is not an id
            return int(index)
    if text in tokens:
        return tokens.index(text)
    raise CheckpointError(f"GGUF {' or '.join(keys)} is missing, and there is no token {text}")
