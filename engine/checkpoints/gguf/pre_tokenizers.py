"""Rules by which byte-level BPE vocabularies of GGUF files split text before merging. Data only.

GGUF files name the rule (`tokenizer.ggml.pre`), and only llama.cpp (src/llama-vocab.cpp) defines
the names. The expressions come from the tokenizer.json that each model family publishes.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Regular expressions that apply in order; each makes every match a separate piece."""

    splits: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is not split, even if no merges build it
    adds_bos: bool = False  # default for files without tokenizer.ggml.add_bos_token


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
    (PreTokenizer((_GPT2,)), "gigachat a.x-4.0 modern-bert"),
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
