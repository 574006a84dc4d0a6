"""At least 200 requests over all fields that the API serves: each value of each field alone, then
random mixes.

Pure. A field without values here is an error, so that a new field cannot be left out.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.gateway.anthropic.schema import MessagesBody
from pdserve.gateway.openai.bodies.sampling import PENALTIES
from pdserve.gateway.openai.bodies.schema import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    TokenizeChatBody,
)
from pdserve.gateway.openai.responses.schema import LOGPROBS, ResponsesBody

Values = dict[str, list[Any]]
Request = tuple[str, dict[str, Any]]  # path and body

SHORT = "Name three rivers and a mountain."
LONG = "The quick brown fox jumps over the lazy dog. " * 40  # long enough for a remote prefill
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
ARRAY = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4}
REGEX = "[a-f]{4}-[0-9]{2,6}"
GBNF = 'root ::= "on " word+\nword ::= [a-z]+ "."'
LARK = 'start: "on " WORD ("," WORD)*\nWORD: /[a-z]{1,8}/'
TAG = {
    "structures": [{"begin": "<n>", "schema": {"type": "integer", "maximum": 99}, "end": "</n>"}],
    "triggers": ["<"],
}
IDS = list(range(300, 900, 7))
MEASURE = {"name": "measure", "description": "The size of a thing.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": MEASURE}
STRICT_TOOL = {"type": "function", "function": {**MEASURE, "strict": True}}
NAMED = {"type": "function", "function": {"name": "measure"}}
ALLOWED = {"mode": "required", "tools": [NAMED]}
USAGE_IN_CHUNKS = {"include_usage": True, "continuous_usage_stats": True}

# Each sets a structure, and a request may have only one.
STRUCTURES: Values = {
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": ARRAY, "strict": True}},
        {"type": "structural_tag", **TAG},
    ],
    "structured_outputs": [
        {"json": SCHEMA},
        {"json": ARRAY, "disable_any_whitespace": True},
        {"regex": REGEX},
        {"choice": ["yes", "no", "perhaps"]},
        {"grammar": LARK},
        {"json_object": True},
        {"structural_tag": TAG},
    ],
    "guided_json": [SCHEMA],
    "guided_regex": [REGEX],
    "guided_choice": [["north", "south"]],
    "guided_grammar": [LARK],
    "regex": [REGEX],
    "ebnf": [GBNF],
    "json_schema": [ARRAY],
    "grammar": [GBNF],
    "structural_tag": [TAG],
    "constraint": [REGEX],
    "constraint_type": ["regex"],
}
# The names of the thinking budget, of which a request also has only one.
BUDGETS: Values = {
    "thinking_token_budget": [4, -1],
    "thinking_budget": [0],
    "reasoning_budget": [8],
}
# For chats and plain completions.
SHARED: Values = {
    "n": [1, 2],
    "stream": [False, True],
    "stream_options": [{"include_usage": True}, USAGE_IN_CHUNKS],
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.5, 1.0],
    "top_k": [1, 40, -1],
    "min_p": [0.0, 0.1],
    "repetition_penalty": [1.1],
    "repeat_penalty": [1.1],
    "repeat_last_n": [-1, 64],
    "presence_penalty": [0.5],
    "frequency_penalty": [0.5],
    "logit_bias": [{"28": 5.0}],
    "seed": [7, -3],
    "stop": ["\n", [".", "river"]],
    "stop_token_ids": [[30]],
    "allowed_token_ids": [IDS],
    "bad_words": [["river", "The"]],
    "logprob_token_ids": [[28, 30, 49000]],
    "prompt_logprobs": [0, 2],
    "return_tokens_as_token_ids": [True],
    "ignore_eos": [True],
    "min_tokens": [5],
    "max_tokens": [1, 20],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "cache_salt": ["salt"],
    "priority": [-1, 5],
    "truncate_prompt_tokens": [20, -1],
    "return_token_ids": [True],
    "session_id": ["a session"],
    "user": ["a user"],
}
# Enable or disable thinking; the fields of one request agree.
THINKING: Values = {
    "enable_thinking": [False, True],
    "think": [True, "low"],
    "thinking": [False, {"type": "disabled"}],
}
# Control how a conversation becomes a prompt.
CONVERSATION: Values = {
    **THINKING,
    "reasoning": [{"effort": "low"}],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True],
    "add_special_tokens": [False],
    "chat_template_kwargs": [{}],
    "reasoning_effort": ["low", "none"],
    "verbosity": ["low"],
    "tools": [[TOOL]],
}
OF_CHAT: Values = {
    **SHARED,
    **STRUCTURES,
    **BUDGETS,
    **CONVERSATION,
    "logprobs": [True],
    "top_logprobs": [3],
    "max_completion_tokens": [12],
    "tools": [[TOOL], [STRICT_TOOL]],
    "tool_choice": ["none", "auto", "required", NAMED, {"type": "allowed_tools", **ALLOWED}],
    "parallel_tool_calls": [False, True],
    "include_reasoning": [False, True],
    "separate_reasoning": [False, True],
    "reasoning_format": ["none", "hidden"],
}
OF_COMPLETIONS: Values = {
    **SHARED,
    **STRUCTURES,
    **BUDGETS,
    "prompt_token_ids": [IDS[:40], [IDS[:3], IDS[:20]]],
    "best_of": [3],
    "echo": [True],
    "logprobs": [0, 4],
    "add_special_tokens": [True, False],
}
OF_RESPONSES: Values = {
    **THINKING,
    "instructions": ["Answer in one word."],
    "stream": [False, True],
    "store": [False],
    "include": [[], [LOGPROBS]],
    "max_output_tokens": [1, 20],
    "temperature": [0],
    "top_p": [1e-6],
    **{name: SHARED[name] for name in PENALTIES},
    "top_k": [1],
    "min_p": [0.5],
    "seed": [7],
    "repeat_last_n": [0, 64],
    "chat_template_kwargs": [{}],
    "top_logprobs": [3],
    "tools": [[{"type": "function", **MEASURE}]],
    "tool_choice": ["none", "auto", "required", {"type": "function", "name": "measure"}],
    "parallel_tool_calls": [False],
    "max_tool_calls": [1],
    "text": [
        {"format": {"type": "text"}, "verbosity": "low"},
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
    ],
    "reasoning": [{"effort": "low"}],
    "priority": [1],
    "metadata": [{"key": "value"}],
    "session_id": ["a session"],
    "user": ["a user"],
    "safety_identifier": ["an id"],
    "prompt_cache_key": ["a key"],
}
OF_MESSAGES: Values = {
    "system": ["Answer in one word.", [{"type": "text", "text": "Be brief."}]],
    "tools": [[{"name": "measure", "input_schema": SCHEMA}]],
    "tool_choice": [
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "any"},
        {"type": "tool", "name": "measure"},
        {"type": "none"},
    ],
    **THINKING,
    "thinking": [{"type": "enabled", "budget_tokens": 4}, {"type": "disabled"}],
    "output_config": [
        {"effort": "low"},
        {"format": {"type": "json_schema", "schema": SCHEMA}},
    ],
    "output_format": [{"type": "json_schema", "schema": SCHEMA}],
    "max_tokens": [1, 20],
    "stream": [False, True],
    "temperature": [0],
    "top_p": [1e-6],
    "top_k": [1],
    "stop_sequences": [["."]],
    "metadata": [{"user_id": "a user"}],
}
# Determine the prompt of a chat.
OF_TOKENIZED_CHATS: Values = {
    **STRUCTURES,
    **CONVERSATION,
    "tool_choice": OF_CHAT["tool_choice"],
    "prompt_logprobs": [2],
    "return_token_strs": [True],
}
TOKENIZE: Values = {"add_special_tokens": [True, False], "return_token_strs": [False, True]}

# Other fields that a field needs, for each path that has it.
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"max_tokens": 48} for name in (*STRUCTURES, "output_config", "output_format")},
    "constraint_type": {"constraint": REGEX, "max_tokens": 48},
    "text": {"max_output_tokens": 48},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": 1},
    "return_tokens_as_token_ids": {"logprobs": 1, "return_token_ids": True},
    "continue_final_message": CONTINUED,
    "tool_choice": {"tools": [TOOL], "max_tokens": 48},
    "parallel_tool_calls": {"tools": [TOOL]},
}
# The same for paths with different field names.
NEEDS_OF: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        **dict.fromkeys(BUDGETS, CONTINUED),  # of a thought that has begun
        "logprob_token_ids": {"logprobs": True},
        "return_tokens_as_token_ids": {"logprobs": True, "return_token_ids": True},
    },
    "/v1/responses": {
        "top_logprobs": {"include": [LOGPROBS]},
        "tool_choice": {"tools": OF_RESPONSES["tools"][0], "max_output_tokens": 48},
        "parallel_tool_calls": {"tools": OF_RESPONSES["tools"][0]},
    },
    "/tokenize": {
        "tool_choice": {"tools": [TOOL]},
        **{name: {} for name in STRUCTURES},
        "constraint_type": {"constraint": REGEX},
    },
    "/v1/messages": {"tool_choice": {"tools": OF_MESSAGES["tools"][0], "max_tokens": 48}},
}
# A mix has at most one field of each group.
GROUPS: tuple[frozenset[str], ...] = (
    frozenset({*STRUCTURES, "ignore_eos", "min_tokens", "allowed_token_ids"}),
    frozenset({*STRUCTURES, "max_tokens"}),  # it is among their needs
    frozenset({"stream", "prompt_logprobs", "best_of", "stream_options"}),
    frozenset({"logprobs", "top_logprobs", "logprob_token_ids", "return_tokens_as_token_ids"}),
    frozenset({"add_generation_prompt", "continue_final_message", *BUDGETS}),
    frozenset({"prompt_token_ids", *BUDGETS}),  # of a thought that has begun
    frozenset({"allowed_token_ids", *BUDGETS}),  # which needs the token that ends it
    frozenset({"include", "top_logprobs"}),
    frozenset({*THINKING, "reasoning", "reasoning_effort"}),
    frozenset({"repetition_penalty", "repeat_penalty"}),
    frozenset({"thinking", "max_tokens"}),
)
# Used only alone: templates that cannot render tools refuse them.
NOT_MIXED = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


@dataclass(frozen=True)
class Endpoint:
    """A path with the fields of its body other than those of the prompt, and the number of
    mixes."""

    path: str
    kind: Any
    prompt: tuple[str, ...]
    values: Values
    mixes: int
    aside: tuple[str, ...] = ()  # fields that cannot be part of one request


ENDPOINTS = (
    Endpoint("/v1/chat/completions", ChatBody, ("messages",), OF_CHAT, 40),
    Endpoint("/v1/completions", CompletionBody, ("prompt",), OF_COMPLETIONS, 40),
    Endpoint(
        "/v1/responses", ResponsesBody, ("input",), OF_RESPONSES, 8, ("previous_response_id",)
    ),
    Endpoint("/v1/messages", MessagesBody, ("messages",), OF_MESSAGES, 8),
    Endpoint("/tokenize", TokenizeBody, ("prompt",), TOKENIZE, 0),
    Endpoint(
        "/tokenize",
        TokenizeChatBody,
        ("messages",),
        OF_TOKENIZED_CHATS,
        0,
    ),
)


def requests(model: str) -> list[Request]:
    """All requests. Sampling without a seed would differ between runs, so each has a seed or is
    greedy."""
    made = [(e, body) for e in ENDPOINTS for body in (*_singles(e), *_mixes(e))]
    return [(e.path, _complete(e, model, body, i)) for i, (e, body) in enumerate(made)]


def needs_tools(body: dict[str, Any]) -> bool:
    """Whether a model can answer only if its template renders tools."""
    return bool(body.get("tools"))


def needs_thoughts(body: dict[str, Any]) -> bool:
    """Whether only a gateway that parses thoughts answers."""
    return any(name in body for name in BUDGETS) or bool(body.get("thinking"))


def _singles(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    known = {"model", *endpoint.prompt, *endpoint.values, *endpoint.aside}
    if lacking := set(endpoint.kind.model_fields) - known:
        raise ValueError(f"no values for {sorted(lacking)} of {endpoint.path}")
    for name, options in endpoint.values.items():
        for value in options:
            yield {**_needs(endpoint, name), name: value}


def _mixes(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    chosen = random.Random(endpoint.path)
    names = [name for name in endpoint.values if name not in NOT_MIXED]
    for _ in range(endpoint.mixes):
        body: dict[str, Any] = {}
        some: list[str] = []
        for name in chosen.sample(names, chosen.randint(4, 7)):
            if not any(name in group and group & set(some) for group in GROUPS):
                some.append(name)
        for name in some:
            body = _needs(endpoint, name) | body | {name: chosen.choice(endpoint.values[name])}
        yield body


def _needs(endpoint: Endpoint, name: str) -> dict[str, Any]:
    return NEEDS_OF.get(endpoint.path, {}).get(name, NEEDS.get(name, {}))


def _complete(endpoint: Endpoint, model: str, body: dict[str, Any], index: int) -> dict[str, Any]:
    """The body with a model, a prompt shared with two others, and a seed and few tokens if these
    are fields."""
    number = index // 3
    text = f"{number} {LONG if number % 2 else SHORT}"
    fields = endpoint.kind.model_fields
    usual = {
        "seed": index,
        "max_tokens": 12,
        "max_output_tokens": 12,
        "temperature": 0,
        "store": False,
    }
    if "seed" in fields:
        del usual["temperature"]
    given = {name: value for name, value in usual.items() if name in fields}
    return {"model": model, **given, **_prompt(endpoint.prompt[0], text, body), **body}


def _prompt(field: str, text: str, body: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a body; a thinking budget gets a prompt in which a thought has begun."""
    if "prompt_token_ids" in body:
        return {}
    begun = "<think>The first is" if needs_thoughts(body) else ""
    if field != "messages":
        return {field: f"{text} {begun}".rstrip()}
    messages = [{"role": "user", "content": text}]
    if body.get("continue_final_message") or begun:
        messages.append({"role": "assistant", "content": begun or "The first is"})
    return {field: messages}


def paths(asked: Sequence[Request]) -> dict[str, int]:
    """The number of requests per path."""
    ordered = sorted(path for path, _ in asked)
    return {path: len(list(some)) for path, some in itertools.groupby(ordered)}
