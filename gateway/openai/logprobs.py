"""Log-probabilities in OpenAI's format, and those of a prompt in vLLM's."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pdserve.gateway.choice import LogprobEntry, ScoredToken, scored
from pdserve.gateway.http.answers.json_text import (
    AT_ONCE,
    JsonList,
    JsonPieces,
    list_json,
    object_json,
)
from pdserve.gateway.prepared_completion import Prompt
from pdserve.gateway.sampling import MAX_LOGPROBS, refuse
from pdserve.gateway.text.vocabulary import Vocabulary
from pdserve.protos.common_pb2 import TokenLogprob


def of_chat(tokens: Sequence[ScoredToken], as_ids: bool) -> dict[str, Any]:
    """Return the `logprobs` of a chat's tokens; `as_ids`: write tokens by their ids."""
    content = [with_top(token, as_ids) for token in tokens]
    return {"content": content, "refusal": None}


def with_top(token: ScoredToken, as_ids: bool) -> dict[str, Any]:
    top = [_entry(entry, as_ids) for entry in token.top]
    return {**_entry(token.chosen, as_ids), "top_logprobs": top}


def _entry(entry: LogprobEntry, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(entry, as_ids), "logprob": entry.logprob, "bytes": list(entry.raw)}


def of_completion(tokens: Sequence[ScoredToken], as_ids: bool) -> dict[str, Any]:
    return {
        "tokens": [_name(token.chosen, as_ids) for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": [_top_by_name(token, as_ids) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top_by_name(token: ScoredToken, as_ids: bool) -> dict[str, float | None] | None:
    if token.chosen.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for entry in (*token.top, token.chosen):
        top.setdefault(_name(entry, as_ids), entry.logprob)
    return top


def _name(entry: LogprobEntry, as_ids: bool) -> str:
    return f"token_id:{entry.id}" if as_ids else entry.text


class LogprobsText(ABC):
    """The JSON text of a choice's log-probabilities, which grows with its tokens: objects would
    take several times as much memory."""

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids

    async def add(self, tokens: Sequence[ScoredToken]) -> None:
        """Add the next tokens; other tasks run after every AT_ONCE of them."""
        for start in range(0, len(tokens), AT_ONCE):
            self._write(tokens[start : start + AT_ONCE])
            if len(tokens) > AT_ONCE:
                await asyncio.sleep(0)

    @abstractmethod
    def _write(self, tokens: Sequence[ScoredToken]) -> None:
        """Add a few tokens."""

    @abstractmethod
    def pieces(self) -> JsonPieces:
        """Return the text so far."""


class ChatLogprobsText(LogprobsText):
    """The `logprobs` of a chat's choice."""

    def __init__(self, as_ids: bool) -> None:
        super().__init__(as_ids)
        self._content = JsonList()

    def _write(self, tokens: Sequence[ScoredToken]) -> None:
        self._content.extend(of_chat(tokens, self._as_ids)["content"])

    def pieces(self) -> JsonPieces:
        return object_json({"content": self._content.pieces(), "refusal": None})


class CompletionLogprobsText(LogprobsText):
    """The `logprobs` of a completion's choice."""

    def __init__(self, as_ids: bool) -> None:
        super().__init__(as_ids)
        self._lists = {name: JsonList() for name in of_completion((), as_ids)}

    def _write(self, tokens: Sequence[ScoredToken]) -> None:
        for name, values in of_completion(tokens, self._as_ids).items():
            self._lists[name].extend(values)

    def pieces(self) -> JsonPieces:
        return object_json({name: values.pieces() for name, values in self._lists.items()})


async def prompt_json(
    vocabulary: Vocabulary, ids: Sequence[int], scores: Sequence[TokenLogprob], num_top: int
) -> JsonPieces:
    """Return the text of a list with each token of a prompt and the best at its position, by id;
    the first token has none.

    A token that is not among the best has no rank: the engine does not count it.
    """

    def entry(position: int) -> dict[str, Any] | None:
        if position == 0:
            return None
        token = scored(vocabulary, ids[position], scores[position - 1], 0)
        ranks = {candidate.id: rank for rank, candidate in enumerate(token.top, start=1)}
        return {
            str(candidate.id): {
                "logprob": candidate.logprob,
                **({"rank": ranks[candidate.id]} if candidate.id in ranks else {}),
                "decoded_token": candidate.text,
            }
            for candidate in (token.chosen, *token.top[:num_top])
        }

    return await list_json(range(len(ids)), entry)


def check_prompt_logprobs(prompts: Sequence[Prompt], n: int, num_top: int, param: str) -> None:
    """Check the number of entries. Raises ServiceError for more than one answer may have."""
    entries = n * (1 + num_top) * sum(len(prompt.ids) for prompt in prompts)
    if entries > MAX_LOGPROBS:
        text = f"{param}: the prompts need {entries} log-probabilities for {n} choices"
        raise refuse(param, f"{text}; at most {MAX_LOGPROBS}")
