"""200 requests over all fields of the API, and what two systems must agree on of their answers.

Pure but for `ask`. A field that has no values here is an error, so that nobody adds a field and
leaves it out.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from pdserve.gateway.openai.bodies.schema import ChatBody, CompletionBody

NUM_REQUESTS = 200
SHORT = "Name three rivers and a mountain."
LONG = "The quick brown fox jumps over the lazy dog. " * 40  # long enough to be prefilled apart
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}

USAGE_IN_CHUNKS = {"include_usage": True, "continuous_usage_stats": True}

# Values of each field that both endpoints have.
SHARED: dict[str, list[Any]] = {
    "n": [1, 2],
    "stream": [False, True],
    "stream_options": [{"include_usage": True}, USAGE_IN_CHUNKS],
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.5, 1.0],
    "top_k": [1, 40, -1],
    "min_p": [0.0, 0.1],
    "repetition_penalty": [1.1],
    "presence_penalty": [0.5],
    "frequency_penalty": [0.5],
    "logit_bias": [{"28": 5.0}],
    "seed": [7, -3],
    "stop": ["\n", [".", "river"]],
    "stop_token_ids": [[30]],
    "ignore_eos": [True],
    "min_tokens": [5],
    "max_tokens": [1, 20],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "cache_salt": ["salt"],
    "truncate_prompt_tokens": [20, -1],
    "return_token_ids": [True],
}  # fmt: skip
OF_CHAT: dict[str, list[Any]] = {
    "add_generation_prompt": [True],
    "continue_final_message": [True],
    "add_special_tokens": [False],
    "chat_template_kwargs": [{}],
    "reasoning_effort": ["low"],
    "logprobs": [True],
    "top_logprobs": [3],
    "max_completion_tokens": [12],
}
OF_COMPLETIONS: dict[str, list[Any]] = {
    "best_of": [3],
    "echo": [True],
    "logprobs": [0, 4],
    "add_special_tokens": [True, False],
}
# What a field needs beside it.
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"add_generation_prompt": False},
}
ALONE = ("best_of",)  # not with stream


def requests(model: str) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies: each value of each field alone, then random mixes. Sampling without a seed
    would differ from run to run, so each has one."""
    made = [
        *_singles("/v1/chat/completions", ChatBody, SHARED | OF_CHAT),
        *_singles("/v1/completions", CompletionBody, SHARED | OF_COMPLETIONS),
    ]
    mixes = zip(
        _mixes("/v1/chat/completions", SHARED | OF_CHAT, 1),
        _mixes("/v1/completions", SHARED | OF_COMPLETIONS, 2),
        strict=False,
    )
    for pair in mixes:
        made += pair
        if len(made) >= NUM_REQUESTS:
            break
    return [(path, _complete(path, model, body, i)) for i, (path, body) in enumerate(made)]


def _singles(path: str, kind: Any, values: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    lacking = set(kind.model_fields) - set(values) - {"model", "messages", "prompt"}
    if lacking:
        raise ValueError(f"no values for {sorted(lacking)} of {path}")
    for name, options in values.items():
        for value in options:
            yield path, {**NEEDS.get(name, {}), name: value}


def _mixes(path: str, values: dict[str, list[Any]], seed: int) -> Iterator[tuple[str, Any]]:
    chosen = random.Random(seed)
    names = [name for name in values if name not in ALONE and name not in NEEDS]
    while True:
        some = chosen.sample(names, chosen.randint(3, 6))
        yield path, {name: chosen.choice(values[name]) for name in some}


def _complete(path: str, model: str, body: dict[str, Any], index: int) -> dict[str, Any]:
    """With a model, a prompt of its own, a seed and few tokens."""
    text = f"{index} {LONG if index % 2 else SHORT}"
    given: dict[str, Any] = {"model": model, "seed": index, "max_tokens": 12, **body}
    if path == "/v1/completions":
        return {**given, "prompt": text}
    messages = [{"role": "user", "content": text}]
    if body.get("continue_final_message"):
        messages.append({"role": "assistant", "content": "The first is"})
    return {**given, "messages": messages}


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """The answer without what differs from call to call; a stream as its chunks joined."""
    answer = client.post(path, json=body)
    if not body.get("stream") or answer.status_code != 200:
        return [answer.status_code, _normal(answer.json())]
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return [answer.status_code, joined([_normal(json.loads(event)) for event in events[:-1]])]


def _normal(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By choice: texts and lists of its chunks in a row, and what is said once. How many tokens a
    chunk has is a matter of time, so `usage` counts of the last chunk alone."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in itertools.chain.from_iterable(chunk.get("choices", ()) for chunk in chunks):
        _add(choices.setdefault(choice["index"], {}), choice)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usages[-1:]}


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}) or {}, value)
        elif isinstance(value, str | list) and isinstance(whole.get(name), str | list):
            whole[name] += value
        elif value is not None or name not in whole:
            whole[name] = value
