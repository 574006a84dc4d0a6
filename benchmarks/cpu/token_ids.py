"""Prompts of token ids, the same for every contender; needs only the standard library."""

import random


def prompt_ids(length: int, number: int, vocab: int) -> tuple[int, ...]:
    """Prompt `number`: pseudo-random ids; different numbers share no prefix worth caching.

    Ids below 300 are left out: special and byte tokens of the models used here.
    """
    draw = random.Random(number)
    return tuple(draw.randrange(300, vocab) for _ in range(length))
