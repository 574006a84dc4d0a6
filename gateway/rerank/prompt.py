"""The prompt in which Qwen3-Reranker judges a document, as in its model card.

As there, the frame is tokenized separately, so that a client's text never becomes a special token.
So is the document, after a line break, where Qwen's tokenizer always starts a new token.
"""

import asyncio
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from pdserve.gateway.catalog import ServedModel
from pdserve.gateway.content.model_texts import check_room
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service

BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWER_TOKENS = 1
MAX_CALL_TOKENS = 1 << 22  # of all prompts of a call


class JudgingIds(Collection[int]):
    """The token ids of one prompt, in parts shared with the call's other prompts: copies for 2,048
    prompts with a long query would take gigabytes."""

    def __init__(self, *parts: Sequence[int]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def __contains__(self, token: object) -> bool:
        return any(token in part for part in self._parts)


async def judging_ids(
    service: Service,
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    param: str,
    owner: bytes,
    kept_tokens: int | None,
) -> list[JudgingIds]:
    """Return the token ids of a prompt for each query and document. With `kept_tokens` the end of a
    text is cut, so that the prompt has at most that many; -1: as many as fit. Raises ServiceError
    that names `param`."""

    async def ids(text: str, *, special: bool) -> "array[int]":
        token_ids = await service.texts.text_ids(
            model, text, param, owner, add_special_tokens=False, parse_special=special
        )
        return array("I", token_ids)

    prefix, suffix = await ids(BEFORE, special=True), await ids(AFTER, special=True)
    max_text_tokens = (
        None
        if kept_tokens is None
        else _max_text_tokens(model, kept_tokens, len(prefix) + len(suffix))
    )
    query_ids: dict[str, Sequence[int]] = {}  # by query
    prompts: list[JudgingIds] = []
    num_tokens = 0
    for query, document in pairs:
        if query not in query_ids:
            text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n"
            query_ids[query] = (await ids(text, special=False))[:max_text_tokens]
        query_part = query_ids[query]
        remaining = None if max_text_tokens is None else max_text_tokens - len(query_part)
        document_part = (await ids(f"<Document>: {document}", special=False))[:remaining]
        prompt = JudgingIds(prefix, query_part, document_part, suffix)
        check_room(len(prompt), ANSWER_TOKENS, model, param)
        num_tokens += len(prompt)
        if num_tokens > MAX_CALL_TOKENS:
            text = f"the prompts of all {param} have more than {MAX_CALL_TOKENS} tokens in total"
            raise refuse(param, text)
        prompts.append(prompt)
        await asyncio.sleep(0)
    return prompts


def _max_text_tokens(model: ServedModel, kept_tokens: int, frame_tokens: int) -> int:
    """Return how many tokens of a text fit besides the frame's. Raises ServiceError."""
    max_tokens = model.card.context_len - ANSWER_TOKENS
    if kept_tokens != -1 and not frame_tokens < kept_tokens <= max_tokens:
        allowed = f"-1, or from {frame_tokens + 1} to {max_tokens}"
        raise refuse("truncate_prompt_tokens", f"truncate_prompt_tokens must be {allowed}")
    return max(1, (max_tokens if kept_tokens == -1 else kept_tokens) - frame_tokens)
