"""Builds the tokenizer that grammars are compiled for. The gateway, which checks grammars, and the
workers, which apply them, both use this module, so that their tokenizers are equal."""

from collections.abc import Sequence

from llguidance import LLTokenizer


def make_tokenizer(tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Build the tokenizer that grammars are compiled for, from a model's tokenizer.json.

    Raises ValueError if grammars cannot use the model's tokenizer. Takes about 10 us per token of
    the vocabulary; during that time no other thread of the process runs Python.
    """
    if not eos_ids:
        raise ValueError("the model has no end-of-text token, which grammars need")
    text, eos = tokenizer_json.decode(), list(eos_ids)
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError as error:
        if "too small" not in str(error):
            raise
        return LLTokenizer(text, eos_token=eos)  # the tokenizer has more ids than the model
