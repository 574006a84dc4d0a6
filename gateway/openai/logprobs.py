"""Log-probabilities as OpenAI's API writes them, and those of a prompt as vLLM does."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pdserve.gateway.choice import LogprobEntry, ScoredToken, scored
from pdserve.gateway.text.vocabulary import Vocabulary
from pdserve.protos.common_pb2 import TokenLogprob

AT_ONCE = 256  # tokens of a prompt that are described before others have the loop


def of_chat(tokens: Sequence[ScoredToken], as_ids: bool) -> dict[str, Any]:
    """`as_ids`: tokens are written by their ids."""
    content = [
        {
            **_entry(token.chosen, as_ids),
            "top_logprobs": [_entry(top, as_ids) for top in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(entry: LogprobEntry, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(entry, as_ids), "logprob": entry.logprob, "bytes": list(entry.raw)}


def of_completion(tokens: Sequence[ScoredToken], as_ids: bool) -> dict[str, Any]:
    tops: list[dict[str, float | None] | None] = []
    for token in tokens:
        if token.chosen.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float | None] = {}
        for entry in (*token.top, token.chosen):
            top.setdefault(_name(entry, as_ids), entry.logprob)
        tops.append(top)
    return {
        "tokens": [_name(token.chosen, as_ids) for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": [token.offset for token in tokens],
    }


def _name(entry: LogprobEntry, as_ids: bool) -> str:
    return f"token_id:{entry.id}" if as_ids else entry.text


async def of_prompt(
    vocabulary: Vocabulary, ids: Sequence[int], scores: Sequence[TokenLogprob], num_top: int
) -> list[dict[str, Any] | None]:
    """Each token of a prompt and the best at its position, by id; the first token has none.

    A token that is not among the best has no rank: the engine does not count it.
    """
    described: list[dict[str, Any] | None] = [None]
    for at, (token, score) in enumerate(zip(ids[1:], scores, strict=True)):
        if at % AT_ONCE == 0:
            await asyncio.sleep(0)
        of_token = scored(vocabulary, token, score, 0)
        ranks = {entry.id: rank for rank, entry in enumerate(of_token.top, start=1)}
        described.append(
            {
                str(entry.id): {
                    "logprob": entry.logprob,
                    **({"rank": ranks[entry.id]} if entry.id in ranks else {}),
                    "decoded_token": entry.text,
                }
                for entry in (of_token.chosen, *of_token.top[:num_top])
            }
        )
    return described
