"""Makes the tokenizer of a model's grammars, the same for the gateway, which checks grammars, and
for workers, which apply them."""

from collections.abc import Sequence

from llguidance import LLTokenizer


def make_tokenizer(tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Make the tokenizer that grammars are compiled for. Raises ValueError if it cannot be used.

    Takes about 10 us per token of the vocabulary, during which no other thread runs Python.
    """
    if not eos_ids:
        raise ValueError("the model has no token that ends a text")
    text, eos = tokenizer_json.decode(), list(eos_ids)
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError as error:
        if "too small" not in str(error):
            raise
        return LLTokenizer(text, eos_token=eos)  # the tokenizer has more ids than the model
