"""Converts a GGUF file's tokenizer to tokenizer.json, the format that the rest of the system reads.

GGUF files name the rule by which text is split before merging (`tokenizer.ggml.pre`), and only
llama.cpp (src/llama-vocab.cpp) defines the names. The expressions come from the tokenizer.json that
each model family publishes.

Token ids are positions in `tokenizer.ggml.tokens`. The reader bounds the metadata's size;
inconsistent metadata raises CheckpointError.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.engine.checkpoints.gguf.encoder_tokenizer import (
    ENCODERS,
    encoder_frame,
    unigram,
    word_piece,
)
from pdserve.engine.checkpoints.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    numbers,
    strings,
    token_at,
)
from pdserve.engine.checkpoints.source import CheckpointError

_WORDS = r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d" + _WORDS
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SYMBOLS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SYMBOLS
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _SPACES
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_TEKKEN = f"{_CASED}*{_LOWER}+|{_CASED}+{_LOWER}*" + r"|\p{N}" + _PATHS
_GPT4O = (
    f"{_CASED}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}+{_LOWER}*{_CONTRACTIONS}?"
    + r"|\p{N}{1,3}"
    + _PATHS
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
# Letters with a case, as listed in DeepSeek's first vocabularies.
_WITH_CASE = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻ"  # noqa: RUF001
    "Ȿ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001
logger = logging.getLogger(__name__)
_MAX_PIECE = 512  # characters; longer tokens are not split to find merges
_ENDING = ("bos", "eos", "eot", "eom")  # special even if the file does not mark them


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split into pieces before BPE merging: regular expressions that apply in order,
    each of which makes every match a separate piece."""

    splits: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is not split, even if no merges build it
    adds_bos: bool = False  # default for files without tokenizer.ggml.add_bos_token
    composes: bool = False  # text is normalized to NFC


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_GROUPS: tuple[tuple[PreTokenizer, str], ...] = (
    (DEFAULT, "default"),
    (PreTokenizer((_LLAMA3,), True, True), "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral"),
    (PreTokenizer((_LLAMA3,), True, True), "midm-2.0 lfm2 jina-v5-nano"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer((_QWEN2,)), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan"),
    (PreTokenizer((_QWEN2,)), "solar-open grok-2"),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (PreTokenizer((r"\p{N}", _GPT2)), "smollm starcoder refact command-r codeshell exaone"),
    (PreTokenizer((r"\p{N}", _GPT2)), "minerva-7b mellum2"),
    (PreTokenizer((_GPT2,)), "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 mellum"),
    (PreTokenizer((_GPT2,)), "gigachat a.x-4.0 roberta-bpe"),
    (PreTokenizer((_GPT2,), composes=True), "modern-bert"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_TEKKEN,), True, True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (
        PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK)),  # noqa: RUF001
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
        "deepseek-coder",
    ),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_WITH_CASE}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
                r"\s+$",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((_SEED,)), "seed-coder"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
)

PRE_TOKENIZERS = {name: group for group, names in _GROUPS for name in names.split()}


def tokenizer_json(metadata: Mapping[str, Any]) -> bytes:
    """Build tokenizer.json from `tokenizer.ggml.*`: byte-level BPE (gpt2), SentencePiece's BPE
    (llama) or unigram model (t5), or WordPiece (bert).

    Raises CheckpointError for other models, an unknown `pre`, or inconsistent arrays.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = strings(metadata, "tokens")
    types = numbers(metadata, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    if kind == "gpt2":
        tokens, parts = _byte_level(metadata, tokens, types)
    elif kind == "llama":
        tokens, parts = _sentence_piece(metadata, tokens, types)
    elif kind == "bert":
        tokens, parts = word_piece(metadata, tokens, types)
    elif kind == "t5":
        parts = unigram(metadata, tokens)
    else:
        raise CheckpointError(
            f"GGUF tokenizer model {kind!r} is not supported; supported: gpt2, llama, bert, t5"
        )
    is_encoder = kind in ("bert", "t5") or metadata.get("general.architecture") in ENCODERS
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens, types),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": (
            encoder_frame(metadata, tokens, kind)
            if is_encoder
            else _post_processor(metadata, tokens)
        ),
        **parts,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer puts bos before a prompt: the file's setting, or else the
    default of the vocabulary's kind."""
    setting = metadata.get("tokenizer.ggml.add_bos_token")
    if setting is not None:
        return bool(setting)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    pre = PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", "default"))
    return pre is not None and pre.adds_bos


def adds_eos(metadata: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer puts eos after a prompt: only for embedding models, whose
    embedding may come from it. For generative models the file's setting is ignored: they could not
    continue after eos."""
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
        if kind != NORMAL or letters.issuperset(token)
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
    control = {t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL}
    merges = [pair for pair in _merges(metadata) if "".join(pair) not in control]
    model = _bpe(spelled, merges, ignore_merges=pre.whole_words)
    decoder = {**byte_level, "use_regex": True}
    return spelled, {
        "normalizer": {"type": "NFC"} if pre.composes else None,
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
    # The file may store runs of spaces, but text has SPACE in their place when it is matched.
    spelled = [SPACE * len(token) if _is_spaces(token) else token for token in tokens]
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata)
    else:
        scores = numbers(metadata, "scores", len(tokens))
        if scores is None:
            raise CheckpointError("GGUF tokenizer.ggml.scores is missing, and there are no merges")
        merges = _merges_by_score(spelled, types, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = _bpe(
        spelled,
        merges,
        unk_token=None if unknown is None else token_at(tokens, unknown),
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        # Prepend to every text, even if it begins with a space or follows a special token.
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        prefix = {"type": "Prepend", "prepend": SPACE}
        spaces = {"type": "Sequence", "normalizers": [prefix, spaces]}
    decoder = {"type": "Sequence", "decoders": decoders}
    return spelled, {"model": model, "decoder": decoder, "normalizer": spaces}


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: for each token, the pairs of tokens that
    build it, tokens with the best score first.

    The merges build only ordinary tokens and runs of spaces, so no text can become a control token.
    """
    runs = [i for i, token in enumerate(tokens) if types[i] == USER_DEFINED and _is_run(token)]
    normal = [i for i, kind in enumerate(types) if kind == NORMAL]
    normal.sort(key=lambda i: -scores[i])
    pieces = {tokens[i] for i in runs} | {tokens[i] for i in normal}
    pieces.update(t for t, kind in zip(tokens, types, strict=True) if len(t) == 1 and kind < BYTE)
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
    return not token.strip(SPACE)


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
    """Return tokenizer.json's `added_tokens`: the control tokens and the user-defined tokens, which
    match as a whole in any text."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDING)
    ending = {i for i in ids if i is not None}
    # As RoBERTa and ModernBERT, whose text has a space before the mask.
    is_encoder = metadata.get("general.architecture") in ENCODERS
    takes_space = is_encoder and metadata.get("tokenizer.ggml.model") == "gpt2"
    mask = metadata.get("tokenizer.ggml.mask_token_id") if takes_space else None
    added = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind in (CONTROL, UNKNOWN) or index in ending
        if token and (special or (kind == USER_DEFINED and not _is_run(token))):
            added.append(
                {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": index == mask,
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
    names = {
        end: token_at(tokens, token_id) for end, token_id in ids.items() if token_id is not None
    }
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


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in strings(metadata, "merges"):
        left, space, right = merge[1:].partition(" ")  # a token may begin with a space
        if not space:
            raise CheckpointError(f"GGUF tokenizer.ggml.merges: {merge!r} is not a pair of tokens")
        merges.append((merge[0] + left, right))
    return merges


def _byte_alphabet() -> list[str]:
    """Return the printable character by which byte-level BPE (GPT-2, 2019) writes each of the 256
    bytes."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]
