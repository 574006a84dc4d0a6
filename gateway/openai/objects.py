"""Objects that several routes of OpenAI's API return: errors, usage, log-probabilities, and chunks
that have only text.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request

from pdserve.gateway.http.api import (
    AT_ONCE,
    ErrorFormat,
    Event,
    HttpError,
    JsonList,
    JsonPieces,
    list_json,
    object_json,
)
from pdserve.gateway.http.responses import DirectWrite
from pdserve.gateway.openai.request_models import Sampling
from pdserve.gateway.prepared_completion import PreparedCompletion, Prompt, Usage
from pdserve.gateway.sampling import MAX_LOGPROBS, from_wire, refuse
from pdserve.protos.common_pb2 import TokenLogprob
from pdserve.text import Delta, LogprobEntry, ScoredToken, scored
from pdserve.text.tokenizer import Vocabulary

CONTEXT_CODE = "context_length_exceeded"
# Codes that OpenAI names differently; a wrong field has no code, its name is in `param`.
_ERROR_CODES = {
    "invalid_argument": None,
    "unauthenticated": "invalid_api_key",
    "overloaded": "rate_limit_exceeded",
}


def error_message(error: HttpError) -> str:
    """Return the text of an error. If a prompt is too long, the text has the code's name, by which
    LangChain recognizes the error."""
    if error.code != CONTEXT_CODE or CONTEXT_CODE in error.message:
        return error.message
    return f"{error.message} ({CONTEXT_CODE})"


class OpenAiErrors(ErrorFormat):
    """The error format of OpenAI's API."""

    def error_object(self, error: HttpError) -> dict[str, Any]:
        if error.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {
            "error": {
                "message": error_message(error),
                "type": kind,
                "param": error.param or None,
                "code": _ERROR_CODES.get(error.code, error.code or None),
            }
        }

    def error_event(self, error: HttpError) -> Event:
        return data_event(self.error_object(error))


def data_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event whose data are an object."""
    return b"data: %b\n\n" % to_json(value)


def list_page(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of objects that have ids."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def page_query(request: Request, default_limit: int, max_limit: int) -> tuple[str, int, bool]:
    """Return the parameters of the URL that select a page of a list: the id after which it begins
    (or empty), its length, and whether the newest is first. Raises ServiceError that names a wrong
    one."""
    query = request.query_params
    limit = whole_number(query.get("limit", str(default_limit)), "limit", 1, max_limit)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refuse("order", "order must be 'asc' or 'desc'")
    return query.get("after", ""), limit, order == "desc"


def whole_number(text: str, name: str, low: int, high: int) -> int:
    """Parse a whole number. Raises ServiceError that names the parameter."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and low <= int(text) <= high):
        raise refuse(name, f"{name} must be a whole number from {low} to {high}")
    return int(text)


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
    """Makes the `usage` field of chunks: none, null before the last chunk, or the counts so far.
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


def chat_logprobs(tokens: Sequence[ScoredToken], as_ids: bool) -> dict[str, Any]:
    """Return the `logprobs` of a chat's tokens; `as_ids`: name tokens by their ids."""
    content = [token_logprobs(token, as_ids) for token in tokens]
    return {"content": content, "refusal": None}


def token_logprobs(token: ScoredToken, as_ids: bool) -> dict[str, Any]:
    top = [_entry(entry, as_ids) for entry in token.top]
    return {**_entry(token.chosen, as_ids), "top_logprobs": top}


def _entry(entry: LogprobEntry, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(entry, as_ids), "logprob": entry.logprob, "bytes": list(entry.raw)}


def completion_logprobs(tokens: Sequence[ScoredToken], as_ids: bool) -> dict[str, Any]:
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
    """The text of the `logprobs` of a chat's choice."""

    def __init__(self, as_ids: bool) -> None:
        super().__init__(as_ids)
        self._content = JsonList()

    def _write(self, tokens: Sequence[ScoredToken]) -> None:
        self._content.extend(chat_logprobs(tokens, self._as_ids)["content"])

    def pieces(self) -> JsonPieces:
        return object_json({"content": self._content.pieces(), "refusal": None})


class CompletionLogprobsText(LogprobsText):
    """The text of the `logprobs` of a completion's choice."""

    def __init__(self, as_ids: bool) -> None:
        super().__init__(as_ids)
        self._lists = {name: JsonList() for name in completion_logprobs((), as_ids)}

    def _write(self, tokens: Sequence[ScoredToken]) -> None:
        for name, values in completion_logprobs(tokens, self._as_ids).items():
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
        token = scored(vocabulary, ids[position], from_wire(scores[position - 1]), 0)
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
        raise refuse(param, f"{text}; an answer can have at most {MAX_LOGPROBS}")


class TextChunk:
    """Makes the chunks of one choice that differ only in their text. `chunk` makes the object for a
    text."""

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        self._prefix, self._suffix = to_json(chunk(_TEXT)).split(to_json(_TEXT))

    def of(self, text: str) -> JsonPieces:
        return JsonPieces((self._prefix, to_json(text), self._suffix))

    def write(self, text: str, direct: DirectWrite) -> bool:
        """Send the event of a chunk at once, and return whether it was sent. A long text is not: it
        may be held in memory and must then be counted."""
        if len(text) > MAX_DIRECT_CHARS:
            return False
        return direct.write(b"data: %b%b%b\n\n" % (self._prefix, to_json(text), self._suffix))
