"""The prompt in which Qwen3-Reranker judges a document, as its model card has it.

Its three parts are tokenized apart, as there, so that a client's text never becomes a special
token.
"""

import asyncio
from collections.abc import Sequence

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


async def judging_ids(
    service: Service,
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    param: str,
    owner: bytes,
    kept_tokens: int | None,
) -> list[Sequence[int]]:
    """The token ids of a prompt for each query and document. With `kept_tokens` its text loses its
    end, so that the prompt has that many at most; -1: as many as fit. Raises ServiceError that
    names `param`."""

    async def ids(text: str, *, special: bool) -> list[int]:
        return await service.texts.text_ids(
            model, text, param, owner, add_special_tokens=False, parse_special=special
        )

    before, after = await ids(BEFORE, special=True), await ids(AFTER, special=True)
    room = None if kept_tokens is None else _room(model, kept_tokens, len(before) + len(after))
    found: list[Sequence[int]] = []
    for query, document in pairs:
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        prompt = [*before, *(await ids(text, special=False))[:room], *after]
        check_room(len(prompt), ANSWER_TOKENS, model, param)
        found.append(prompt)
        await asyncio.sleep(0)
    return found


def _room(model: ServedModel, kept: int, frame: int) -> int:
    """Tokens that are left of a text beside those of the frame. Raises ServiceError."""
    most = model.card.context_len - ANSWER_TOKENS
    if kept != -1 and not frame < kept <= most:
        limits = f"-1, or from {frame + 1} to {most}"
        raise refuse("truncate_prompt_tokens", f"truncate_prompt_tokens must be {limits}")
    return max(1, (most if kept == -1 else kept) - frame)
