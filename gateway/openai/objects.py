"""JSON objects that several routes of OpenAI's API return: errors, pages of lists, usage,
log-probabilities, and chunks with only text."""

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
    """Return the error's message. If a prompt is too long, the message ends with
    `(context_length_exceeded)`, by which LangChain recognizes this error."""
    if error.code != CONTEXT_CODE or CONTEXT_CODE in error.message:
        return error.message
    return f"{error.message} ({CONTEXT_CODE})"


class OpenAiErrors(ErrorFormat):
    """The format of errors in OpenAI's API: an object `error` with message, type, param and
    code."""

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
    """Return a server-sent event whose data is the JSON text of an object."""
    return b"data: %b\n\n" % to_json(value)


def list_page(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return one page of a list in OpenAI's format. Each object in `data` has an `id`; `has_more`
    says whether further pages follow."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def page_query(request: Request, default_limit: int, max_limit: int) -> tuple[str, int, bool]:
    """Parse the URL parameters `after`, `limit` and `order`, which select a page of a list. Returns
    the id after which the page begins (empty: at the beginning), its maximum length, and whether
    the newest object comes first. Raises ServiceError that names an invalid parameter."""
    query = request.query_params
    limit = whole_number(query.get("limit", str(default_limit)), "limit", 1, max_limit)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refuse("order", "order must be 'asc' or 'desc'")
    return query.get("after", ""), limit, order == "desc"


def whole_number(text: str, name: str, low: int, high: int) -> int:
    """Parse the URL parameter `name` as a whole number from `low` to `high`. Raises ServiceError
    otherwise."""
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
    """Makes the `usage` field of a stream's chunks, depending on `stream_options`: no field, null
    in all chunks but the last, or the token counts so far in every chunk. The counts so far do not
    include cached tokens, which are known only at the end."""

    def __init__(self, body: Sampling, completion: PreparedCompletion) -> None:
        self._include_usage = body.include_usage
        self._continuous = body.continuous_usage
        self._prompt_tokens = sum(len(prompt.ids) for prompt in completion.prompts)
        self._generated: dict[int, int] = {}

    def before(self) -> dict[str, Any]:
        """Return the `usage` field of a chunk that has no new tokens."""
        if not self._continuous:
            return {"usage": None} if self._include_usage else {}
        generated = sum(self._generated.values())
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": generated}
        return {"usage": {**counts, "total_tokens": self._prompt_tokens + generated}}

    def after(self, delta: Delta) -> dict[str, Any]:
        """Count the tokens of the delta, and return the `usage` field of the chunk with this
        delta."""
        if self._continuous:
            self._generated[delta.choice] = delta.num_tokens
        return self.before()


def chat_logprobs(tokens: Sequence[ScoredToken], as_ids: bool) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice's tokens. With `as_ids`, tokens are written as
    `token_id:ID` instead of as text."""
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
    """The `logprobs` of one choice as JSON text to which tokens are added. Text takes a fraction of
    the memory that objects would take."""

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids

    async def add(self, tokens: Sequence[ScoredToken]) -> None:
        """Add the log-probabilities of the next tokens. Lets other tasks run after every AT_ONCE
        tokens."""
        for start in range(0, len(tokens), AT_ONCE):
            self._write(tokens[start : start + AT_ONCE])
            if len(tokens) > AT_ONCE:
                await asyncio.sleep(0)

    @abstractmethod
    def _write(self, tokens: Sequence[ScoredToken]) -> None:
        """Append the log-probabilities of at most AT_ONCE tokens to the text."""

    @abstractmethod
    def pieces(self) -> JsonPieces:
        """Return the JSON text of the tokens added so far."""


class ChatLogprobsText(LogprobsText):
    """The `logprobs` of one choice of a chat completion, as JSON text."""

    def __init__(self, as_ids: bool) -> None:
        super().__init__(as_ids)
        self._content = JsonList()

    def _write(self, tokens: Sequence[ScoredToken]) -> None:
        self._content.extend(chat_logprobs(tokens, self._as_ids)["content"])

    def pieces(self) -> JsonPieces:
        return object_json({"content": self._content.pieces(), "refusal": None})


class CompletionLogprobsText(LogprobsText):
    """The `logprobs` of one choice of a plain completion, as JSON text."""

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
    """Return the JSON text of `prompt_logprobs`: for each position of the prompt an object with the
    prompt's token and the `num_top` most likely tokens, by id; null for the first position.

    The prompt's token has no rank unless it is one of the most likely tokens.
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
    """Raise ServiceError if the log-probabilities of the prompts, for `n` choices with `num_top`
    alternatives per token, are more than MAX_LOGPROBS, the limit of one answer."""
    entries = n * (1 + num_top) * sum(len(prompt.ids) for prompt in prompts)
    if entries > MAX_LOGPROBS:
        text = f"{param}: the prompts need {entries} log-probabilities for {n} choices"
        raise refuse(param, f"{text}; an answer can have at most {MAX_LOGPROBS} log-probabilities")


class TextChunk:
    """Makes the chunks of one choice that differ only in their text. `chunk` returns the chunk's
    object for a text; it is serialized once, and each text is inserted in the result."""

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        self._prefix, self._suffix = to_json(chunk(_TEXT)).split(to_json(_TEXT))

    def of(self, text: str) -> JsonPieces:
        return JsonPieces((self._prefix, to_json(text), self._suffix))

    def write(self, text: str, direct: DirectWrite) -> bool:
        """Send the chunk with this text directly to the client. Returns False if it was not sent:
        the client lags, or the text is over MAX_DIRECT_CHARS and must be counted as buffered
        memory."""
        if len(text) > MAX_DIRECT_CHARS:
            return False
        return direct.write(b"data: %b%b%b\n\n" % (self._prefix, to_json(text), self._suffix))
