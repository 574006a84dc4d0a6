"""Prompts of a given length: common words, drawn at random, so that no two share a prefix."""

import random
from collections.abc import Awaitable, Callable

from pdserve.services.cli.async_client import AsyncApi
from pdserve.services.cli.http_client import ApiError

# Words that are one token each, after a space, in most vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city community name president team minute idea body information back parent face others "
    "level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split(" "))
TRIES = 40
NO_ROUTE = (404, 405, 501)

CountTokens = Callable[[str], Awaitable[int]]


async def make_prompts(
    api: AsyncApi, model: str, count: int, num_tokens: int, seed: int
) -> tuple[list[str], bool]:
    """The prompts, and whether the server's tokenizer confirms their length; if the server has no
    /tokenize, they have `num_tokens` words. Raises ApiError."""
    rng = random.Random(seed)

    async def tokens(text: str) -> int:
        response = await api.post("/tokenize", {"model": model, "prompt": text})
        if response.status in NO_ROUTE:
            raise LookupError
        return int(response.check().json["count"])

    try:
        return [await prompt_of_length(rng, num_tokens, tokens) for _ in range(count)], True
    except LookupError:
        return [random_words(rng, num_tokens) for _ in range(count)], False


def random_words(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, num_words)))


async def prompt_of_length(rng: random.Random, num_tokens: int, tokens: CountTokens) -> str:
    """A text of exactly `num_tokens` tokens. Raises ApiError if none is found in TRIES."""
    words = rng.choices(WORDS, k=max(1, num_tokens))
    for _ in range(TRIES):
        text = " ".join(words)
        num_text_tokens = await tokens(text)
        missing = num_tokens - num_text_tokens
        if not missing:
            return text
        # In words, each of several tokens.
        part = round(abs(missing) * len(words) / max(1, num_text_tokens))
        # For tokenizers of characters.
        shortened = text[:missing] if missing < 0 and part <= 1 else ""
        if missing > 0:
            words += rng.choices(WORDS, k=max(1, part))
        elif shortened.endswith(" "):  # a chat template may strip the space
            words = rng.choices(WORDS, k=len(words))
        elif shortened and await tokens(shortened) == num_tokens:
            return shortened
        else:
            words = words[: max(1, len(words) - max(1, part))]
    raise ApiError(
        f"cannot make a prompt of exactly {num_tokens} tokens; increase --input-tokens", 400
    )
