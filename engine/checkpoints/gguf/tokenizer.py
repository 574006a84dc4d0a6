"""Converts a GGUF file's tokenizer to tokenizer.json, the format that the rest of the system reads.

Token ids are positions in `tokenizer.ggml.tokens`. The reader bounds the metadata's size;
inconsistent metadata raises CheckpointError.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdserve.engine.checkpoints.gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from pdserve.engine.checkpoints.source import CheckpointError

logger = logging.getLogger(__name__)

# llama_token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"  # SentencePiece's character for a space
_MAX_PIECE = 512  # characters; longer tokens are not split to find merges
_ENDING = ("bos", "eos", "eot", "eom")  # special even if the file does not mark them


def tokenizer_json(metadata: Mapping[str, Any]) -> bytes:
    """Build tokenizer.json from `tokenizer.ggml.*`: byte-level BPE (gpt2) or SentencePiece (llama).

    Raises CheckpointError for other models, an unknown `pre`, or inconsistent arrays.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens")
    types = _numbers(metadata, "token_type", len(tokens)) or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        tokens, parts = _byte_level(metadata, tokens, types)
    elif kind == "llama":
        tokens, parts = _sentence_piece(metadata, tokens, types)
    else:
        raise CheckpointError(
            f"GGUF tokenizer model {kind!r} is not supported; supported: gpt2, llama"
        )
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens, types),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, tokens),
        **parts,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether bos precedes a prompt: the file's setting, else the vocabulary's default."""
    setting = metadata.get("tokenizer.ggml.add_bos_token")
    if setting is not None:
        return bool(setting)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    pre = PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", "default"))
    return pre is not None and pre.adds_bos


def adds_eos(metadata: Mapping[str, Any]) -> bool:
    """Return whether eos follows a prompt: only for embedding models, which pool it. A generative
    model could not continue after eos, so the setting is ignored for these."""
    pools = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return bool(pools and metadata.get("tokenizer.ggml.add_eos_token"))


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[list[str], dict[str, Any]]:
    alphabet = _byte_alphabet()
    letters = frozenset(alphabet)
    # An ordinary token that is not spelled in the byte alphabet could never match.
    spelled = [
        token
        if kind != _NORMAL or letters.issuperset(token)
        else "".join(alphabet[byte] for byte in token.encode())
        for token, kind in zip(tokens, types, strict=True)
    ]
    pre = _pre_tokenizer(metadata)
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in pre.splits
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": False})
    control = {t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL}
    merges = [pair for pair in _merges(metadata) if "".join(pair) not in control]
    model = _bpe(spelled, merges, ignore_merges=pre.whole_words)
    decoder = {**byte_level, "use_regex": True}
    return spelled, {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": decoder,
        "model": model,
    }


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if not name:
        logger.warning("the GGUF file has no tokenizer.ggml.pre; using the default pre-tokenizer")
        return DEFAULT
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(f"GGUF tokenizer.ggml.pre {name!r} is not supported")
    return PRE_TOKENIZERS[name]


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[list[str], dict[str, Any]]:
    # The file may store runs of spaces, but text has _SPACE in their place when it is matched.
    spelled = [_SPACE * len(token) if _is_spaces(token) else token for token in tokens]
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata)
    else:
        scores = _numbers(metadata, "scores", len(tokens))
        if scores is None:
            raise CheckpointError("GGUF tokenizer.ggml.scores is missing")
        merges = _merges_by_score(spelled, types, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = _bpe(
        spelled,
        merges,
        unk_token=None if unknown is None else _token(tokens, unknown),
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        # Prepend to every text, even if it begins with a space or follows a special token.
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        prefix = {"type": "Prepend", "prepend": _SPACE}
        spaces = {"type": "Sequence", "normalizers": [prefix, spaces]}
    decoder = {"type": "Sequence", "decoders": decoders}
    return spelled, {"model": model, "decoder": decoder, "normalizer": spaces}


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return merges that build each token from two others, best score first (SentencePiece's BPE).

    They build only ordinary tokens and runs of spaces, so no text can become a control token.
    """
    runs = [i for i, token in enumerate(tokens) if types[i] == _USER_DEFINED and _is_run(token)]
    normal = [i for i, kind in enumerate(types) if kind == _NORMAL]
    normal.sort(key=lambda i: -scores[i])
    pieces = {tokens[i] for i in runs} | {tokens[i] for i in normal}
    pieces.update(t for t, kind in zip(tokens, types, strict=True) if len(t) == 1 and kind < _BYTE)
    merges = []
    for i in (*runs, *normal):
        token = tokens[i]
        if len(token) <= _MAX_PIECE:
            for cut in range(len(token) - 1, 0, -1):
                left = token[:cut]
                if left in pieces and (right := token[cut:]) in pieces:
                    merges.append((left, right))
    return merges


def _is_spaces(token: str) -> bool:
    return bool(token) and not token.strip(" ")


def _is_run(token: str) -> bool:
    return not token.strip(_SPACE)


def _bpe(
    tokens: Sequence[str], merges: Iterable[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": list(merges),
    }


def _added_tokens(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the control tokens and the user-defined tokens, which match as a whole in any text."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDING)
    ending = {i for i in ids if i is not None}
    added = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind in (_CONTROL, _UNKNOWN) or index in ending
        if token and (special or (kind == _USER_DEFINED and not _is_run(token))):
            added.append(
                {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": special,
                }
            )
    return added


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any] | None:
    ends = {"bos": adds_bos(metadata), "eos": adds_eos(metadata)}
    ids = {
        end: metadata.get(f"tokenizer.ggml.{end}_token_id") for end, adds in ends.items() if adds
    }
    names = {end: _token(tokens, token_id) for end, token_id in ids.items() if token_id is not None}
    if not names:
        return None
    signs = {end: [{"SpecialToken": {"id": name, "type_id": 0}}] for end, name in names.items()}
    prefix, suffix = (signs.get(end, []) for end in ("bos", "eos"))
    first, second = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*prefix, first, *suffix],
        "pair": [*prefix, first, *suffix, *prefix, second, *suffix],
        "special_tokens": {
            name: {"id": name, "ids": [ids[end]], "tokens": [name]} for end, name in names.items()
        },
    }


def _token(tokens: Sequence[str], index: Any) -> str:
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(f"GGUF token id {index!r} is outside the vocabulary of {len(tokens)}")
    return tokens[index]


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    strings = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(strings, list) or not strings or not all(isinstance(t, str) for t in strings):
        raise CheckpointError(f"GGUF tokenizer.ggml.{name} is not a list of strings")
    return strings


def _numbers(metadata: Mapping[str, Any], name: str, length: int) -> list[Any] | None:
    numbers = metadata.get(f"tokenizer.ggml.{name}")
    if numbers is None:
        return None
    if len(numbers) != length:
        raise CheckpointError(f"GGUF tokenizer.ggml.{name} has {len(numbers)} items, not {length}")
    return list(numbers)


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(metadata, "merges"):
        left, space, right = merge[1:].partition(" ")  # a token may begin with a space
        if not space:
            raise CheckpointError(f"GGUF tokenizer.ggml.merges: {merge!r} is not a pair")
        merges.append((merge[0] + left, right))
    return merges


def _byte_alphabet() -> list[str]:
    """Return the printable character of each byte in byte-level BPE (GPT-2, 2019)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]
