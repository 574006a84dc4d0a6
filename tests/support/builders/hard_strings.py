"""Texts on which tokenizers and detokenizers differ."""

HARD_STRINGS = (
    "",
    " ",
    "  ",
    "hello",
    " hello",
    "  hello   world  ",
    "Hello, we can use 12345 67 8",
    "line\n\n\nbreaks\r\n\ttabs\t\t",
    "👩\u200d👩\u200d👧\u200d👦 family 🏳️\u200d🌈 👍🏽",
    "日本語のテキスト。漢字とかな",
    "한국어 텍스트",
    "e\u0301 cafe\u0301 n\u0303 Z\u0351\u036b\u0343",
    "العربية עברית हिन्दी ไทย",
    "can't I'LL we've",
    "x" * 200,
    " " * 70 + "y",
    "def f(x):\n    return x  # ok\n",
    "<table><b>x</b></table>",
    "\u2581under\u2581score",
    "\ufffd\x00\x01",
    "\U0001d539old 𐍈",
    "a\u00a0b\u3000c",
    "1,234.56e-7",
    "<|im_end|> <s> </s> <0x0A>",
)

# Special tokens of several families.
SPECIALS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
)
