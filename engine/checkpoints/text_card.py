"""Facts about a model's text that only its tokenizer knows."""

from collections.abc import Iterable

from tokenizers import Tokenizer

from pdserve.engine.checkpoints.source import CheckpointError

# Tokens other than eos with which templates end a turn; tokens that end a part of one are excluded.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endofturn|>")


def load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Load a tokenizer. Raises CheckpointError if the JSON is not a valid tokenizer."""
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error


def puts_before_prompt(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    """Return whether the ids of an encoded text begin with `bos_id`."""
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    return bos_id is not None and ids[:1] == [bos_id]


def turn_end_ids(tokenizer: Tokenizer, template: str) -> set[int]:
    """Return the ids of the usual end-of-turn tokens in both the template and the vocabulary."""
    ids = (tokenizer.token_to_id(text) for text in TURN_ENDS if text in template)
    return {token_id for token_id in ids if token_id is not None}


def checked_ids(ids: Iterable[object], vocab_size: int) -> tuple[int, ...]:
    """Return the distinct ids within the vocabulary, in order; files use -1 for none."""
    integers = (i for i in ids if isinstance(i, int) and not isinstance(i, bool))
    return tuple(dict.fromkeys(i for i in integers if 0 <= i < vocab_size))
