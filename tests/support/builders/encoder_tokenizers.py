"""The tokenizers of tiny encoders: one of each kind, which frame texts and pairs as released ones
do."""

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def encoder_tokenizer(arch: str) -> Tokenizer:
    """Return the tokenizer of an encoder: of BERT by word pieces, of XLM-RoBERTa by a unigram
    model, of ModernBERT by bytes."""
    return {"bert": _word_piece, "xlm_roberta": _unigram, "modernbert": _bytes}[arch]()


def _framed(tokenizer: Tokenizer, single: str, pair: str) -> Tokenizer:
    ids = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    used = [(text, number) for text, number in ids.items() if text in pair]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=used
    )
    return tokenizer


def _word_piece() -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *_LETTERS, *(f"##{c}" for c in _LETTERS), *".,?!'", "th", "##ing", "中"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.enable_padding(length=128)  # as released models have, and no request wants
    tokenizer.enable_truncation(128)
    return _framed(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")


def _unigram() -> Tokenizer:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    scored = [(text, 0.0) for text in special]
    scored += [(text, -2.0 - i / 10) for i, text in enumerate(["▁", *_LETTERS, *".,?!'", "▁th"])]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return _framed(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return _framed(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")
