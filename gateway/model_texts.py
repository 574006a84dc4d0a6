"""Converts clients' texts to token ids of a model and back, within what the model can take."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.sampling import client_errors, refuse, service_error
from pdserve.services.common.capabilities import only_pools
from pdserve.services.common.errors import quoted
from pdserve.services.common.fairness import FairSemaphore
from pdserve.services.common.rate_limits import RateLimits
from pdserve.text import (
    CHARS_PER_TOKEN,
    THINKING_SWITCHES,
    ContextExceeded,
    TemplateInput,
    TextError,
    TooLong,
    context_overflow,
    least_tokens,
    thinking_switches,
)

T = TypeVar("T")

IDS_AT_ONCE = 256  # ids decoded before other tasks run


class ModelTexts:
    """Converts texts to token ids in tokenizer workers, and token ids to text on the event loop,
    where owners take turns. Methods raise ServiceError."""

    def __init__(
        self,
        rates: RateLimits,
        template_kwargs: Collection[str],
        thinking: bool | None = None,
    ) -> None:
        """`template_kwargs`: names that clients may set for a chat template. `thinking`: the value
        of its switch for thinking if a request does not set one; None: the template's own."""
        self._rates = rates
        self._thinking = thinking
        self._template_kwargs = frozenset(template_kwargs)
        self._decoding = FairSemaphore(1)

    async def chat_ids(
        self, model: ServedModel, conversation: TemplateInput, owner: bytes
    ) -> list[int]:
        """Return the token ids of a conversation."""
        if not model.text.has_template:
            text = (
                f"the model {model.card.name!r} cannot chat: it is a base model, which has no chat "
                "template; send a prompt to /v1/completions instead"
            )
            raise refuse(conversation.messages_field, text)
        for name in conversation.variables:
            if name not in self._template_kwargs:
                names = ", ".join(sorted(self._template_kwargs)) or "no names"
                text = f"chat_template_kwargs allows {names} on this gateway, not {quoted(name)}"
                raise refuse(f"chat_template_kwargs.{name}", text)
        allowed = {k: v for k, v in conversation.suggested.items() if k in self._template_kwargs}
        if self._thinking is not None and not _decides_thinking(
            {*allowed, *conversation.variables}
        ):
            allowed |= thinking_switches(self._thinking)
        conversation = replace(conversation, suggested=allowed)
        chars = sum(len(str(message.get("content") or "")) for message in conversation.messages)
        max_chars = _max_prompt_chars(chars, model, conversation.messages_field)
        await self._rates.check_text(owner)
        with _prompt_errors(model, conversation.messages_field):
            return await model.text.workers.chat_ids(owner, conversation, max_len=max_chars)

    async def text_ids(
        self,
        model: ServedModel,
        text: str,
        param: str,
        owner: bytes,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
    ) -> list[int]:
        """Return the token ids of a text; special tokens in it are parsed or taken as text."""
        max_chars = _max_prompt_chars(len(text), model, param)
        await self._rates.check_text(owner)
        with _prompt_errors(model, param):
            return await model.text.workers.text_ids(
                owner,
                text,
                add_special_tokens=add_special_tokens,
                parse_special=parse_special,
                max_len=max_chars,
            )

    async def decode(
        self,
        model: ServedModel,
        ids: Sequence[int],
        param: str,
        owner: bytes,
        *,
        skip_special: bool,
    ) -> str:
        """Return the text of token ids, at most a full context; owners take turns."""
        if len(ids) > model.card.context_len:
            raise service_error(_overflow(model, len(ids), param))
        check_ids(ids, model, param)
        detokenizer = model.text.vocabulary.incremental(skip_special_tokens=skip_special)
        parts = await self._in_turn(ids, owner, detokenizer.push)
        return "".join((*parts, detokenizer.flush()))

    async def token_pieces(self, model: ServedModel, ids: Sequence[int], owner: bytes) -> list[str]:
        """Return each token as the tokenizer's vocabulary writes it; owners take turns."""
        piece_of = model.text.vocabulary.token_piece
        parts = await self._in_turn(ids, owner, lambda part: [piece_of(token) for token in part])
        return list(chain.from_iterable(parts))

    async def _in_turn(
        self, ids: Sequence[int], owner: bytes, convert: Callable[[Sequence[int]], T]
    ) -> list[T]:
        """Apply `convert` to the ids part by part; other tasks run between two parts."""
        results = []
        async with self._decoding.turn(owner):
            for start in range(0, len(ids), IDS_AT_ONCE):
                results.append(convert(ids[start : start + IDS_AT_ONCE]))
                await asyncio.sleep(0)
        return results


def _decides_thinking(names: Collection[str]) -> bool:
    """Return whether a request that sets these variables says whether, or how much, to think."""
    return any(name in names for name in (*THINKING_SWITCHES, "reasoning_effort"))


def kept_ids(
    ids: Sequence[int],
    num_kept: int | None,
    model: ServedModel,
    max_len: int,
    *,
    from_start: bool = False,
) -> Sequence[int]:
    """Return the last `num_kept` ids of a prompt, or with `from_start` the first ones; -1 keeps
    `max_len` ids, which leave enough of the context. What the tokenizer puts around a text is kept,
    and a leading bos. Raises ServiceError for another number that keeps none of the text or exceeds
    the model's context."""
    if num_kept is None:
        return ids
    prefix_len, suffix_len = _frame_lengths(ids, model)
    min_len = prefix_len + suffix_len + 1
    if num_kept == -1:
        num_kept = max(min_len, max_len)
    if not min_len <= num_kept <= model.card.context_len:
        limits = f"-1, or from {min_len} to {model.card.context_len}"
        raise refuse("truncate_prompt_tokens", f"truncate_prompt_tokens must be {limits}")
    if len(ids) <= num_kept:
        return ids
    start_len = num_kept - suffix_len if from_start else prefix_len
    return [*ids[:start_len], *ids[len(ids) - num_kept + start_len :]]


def _frame_lengths(ids: Sequence[int], model: ServedModel) -> tuple[int, int]:
    """Return how many ids of a prompt are before and after its text: those of the tokenizer, or a
    leading bos, which a chat template writes."""
    prefix, suffix = model.text.frames.prefix, model.text.frames.suffix
    if prefix and list(ids[: len(prefix)]) == prefix:
        prefix_len = len(prefix)
    else:
        prefix_len = int(bool(ids) and ids[0] == model.text.vocabulary.model_info.bos_id)
    has_suffix = suffix and list(ids[-len(suffix) :]) == suffix
    return prefix_len, len(suffix) if has_suffix else 0


def check_ids(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Check that the vocabulary has all ids. Raises ServiceError that names `param`."""
    try:
        model.text.vocabulary.check_ids(ids)
    except TextError as error:
        raise refuse(param, str(error)) from error


def check_room(prompt_len: int, num_new: int, model: ServedModel, param: str) -> None:
    """Check that `num_new` tokens fit after a prompt of `prompt_len`. Raises ServiceError."""
    if prompt_len + num_new > model.card.context_len:
        raise service_error(context_overflow(model.card, prompt_len, param, num_new))


def _overflow(model: ServedModel, prompt_len: int, param: str) -> ContextExceeded:
    """Return the error for a prompt that exceeds the context, or leaves no room for a token of a
    model that generates tokens."""
    return context_overflow(model.card, prompt_len, param, 0 if only_pools(model.card) else 1)


def _max_prompt_chars(count: int, model: ServedModel, param: str) -> int:
    """Return how many characters a prompt may have. Raises ServiceError if it has more: `count`."""
    max_chars = int(model.card.context_len) * CHARS_PER_TOKEN
    if count > max_chars:
        raise service_error(_overflow(model, least_tokens(count), param))
    return max_chars


@contextmanager
def _prompt_errors(model: ServedModel, param: str) -> Iterator[None]:
    """Convert a TextError about a prompt to the APIs' ServiceError."""
    with client_errors():
        try:
            yield
        except TooLong as error:
            raise _overflow(model, error.num_tokens, param) from error
