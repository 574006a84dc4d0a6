"""Facts that only the tokenizer itself can tell."""

from collections.abc import Iterable

from tokenizers import Tokenizer

from pdserve.engine.checkpoints.source import CheckpointError

# What templates end a turn with, beside the eos token; not what only ends a part of one.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endofturn|>")


def load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Raises CheckpointError if it is no tokenizer."""
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error


def puts_before_prompt(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    """Whether encoding a text begins with `bos_id`."""
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    return bos_id is not None and ids[:1] == [bos_id]


def turn_end_ids(tokenizer: Tokenizer, template: str) -> set[int]:
    """Ids of the usual end-of-turn tokens that the template writes and the vocabulary has."""
    ids = (tokenizer.token_to_id(text) for text in TURN_ENDS if text in template)
    return {found for found in ids if found is not None}


def checked_ids(ids: Iterable[object], vocab_size: int) -> tuple[int, ...]:
    """Ids within the vocabulary, each once, in the order given; files carry -1 for none."""
    good = (i for i in ids if isinstance(i, int) and not isinstance(i, bool))
    return tuple(dict.fromkeys(i for i in good if 0 <= i < vocab_size))
