"""Parts of completions in OpenAI's format: usage, log-probabilities, chunks that have only text."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import to_json

from pdserve.engine.api import TokenLogprob
from pdserve.gateway.http import AT_ONCE, DirectWrite, JsonList, JsonPieces, list_json, object_json
from pdserve.gateway.openai.request_models import Sampling
from pdserve.gateway.prepared_completion import PreparedCompletion, Prompt, Usage
from pdserve.gateway.sampling import MAX_LOGPROBS, refuse
from pdserve.text import Delta, LogprobEntry, ScoredToken, scored
from pdserve.text.tokenizer import Vocabulary

MAX_DIRECT_CHARS = 1024
_TEXT = "\0text\0"  # occurs in no other field


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        # With KV of other weights or numerics (--allow-mixed-...) a rerun may give other tokens.
        "pdserve": {"inexact": usage.inexact},
    }


class StreamUsage:
    """The `usage` in chunks of a stream: none, null until the last one, or the counts so far.
    Cached tokens are not known before the end."""

    def __init__(self, body: Sampling, completion: PreparedCompletion) -> None:
        self._include_usage = body.include_usage
        self._continuous = body.continuous_usage
        self._prompt_tokens = sum(len(prompt.ids) for prompt in completion.prompts)
        self._generated: dict[int, int] = {}

    def before(self) -> dict[str, Any]:
        """Return the usage of a chunk that comes before the next tokens."""
        if not self._continuous:
            return {"usage": None} if self._include_usage else {}
        generated = sum(self._generated.values())
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": generated}
        return {"usage": {**counts, "total_tokens": self._prompt_tokens + generated}}

    def after(self, delta: Delta) -> dict[str, Any]:
        """Return the usage of a chunk with the delta's tokens."""
        if self._continuous:
            self._generated[delta.choice] = delta.num_tokens
        return self.before()


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


class TextChunk:
    """Maker of the chunks of one choice, from a template: what `chunk` makes of a text."""

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        self._prefix, self._suffix = to_json(chunk(_TEXT)).split(to_json(_TEXT))

    def of(self, text: str) -> JsonPieces:
        return JsonPieces((self._prefix, to_json(text), self._suffix))

    def write(self, text: str, direct: DirectWrite) -> bool:
        """Send the event of a chunk at once; False if that is not possible. A long text goes the
        usual way, since it may be held and must then be counted."""
        if len(text) > MAX_DIRECT_CHARS:
            return False
        return direct.write(b"data: %b%b%b\n\n" % (self._prefix, to_json(text), self._suffix))
