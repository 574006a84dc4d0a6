"""Sampling params of the Python API, with vLLM's names.

The class of the same name in engine/api/request.py is the engine's version: token ids in place of
texts, a compiled grammar, and no None.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from pdserve.engine.api import BOUNDS, THINKING_BUDGET, InvalidRequest, Range
from pdserve.text import Kind, RequestedSampling, Structure

_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
_INTEGERS = ("n", "top_k", "penalty_window", "min_tokens", "max_tokens", "logprobs",
          "prompt_logprobs", "seed", "thinking_token_budget")  # fmt: skip
_RANGES: dict[str, Range] = {
    **{name: bounds.engine for name, bounds in BOUNDS.items() if name != "logit_bias"},
    "top_k": BOUNDS["top_k"].api,
    "seed": Range(-(2**63), 2**64 - 1),  # negative seeds are taken modulo 2**64
    "thinking_token_budget": THINKING_BUDGET,
}
_TEXTS = ("stop", "bad_words")
_IDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of an answer; set exactly one field.

    `json`: a JSON schema, as a dict or as text. `grammar`: Lark or GBNF. `structural_tag`: free
    text with tags, {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False  # between the tokens of JSON

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        names = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(names) != 1:
            names_text = " and ".join(names) or "none"
            raise _refused(
                "structured_outputs", f"needs one of {', '.join(_KINDS)}, not {names_text}"
            )
        self.structure()

    def structure(self) -> Structure:
        """Return the Structure that the grammar compiler takes. Raises InvalidRequest."""
        (name,) = (name for name in _KINDS if getattr(self, name) not in (None, False))
        param, value = f"structured_outputs.{name}", getattr(self, name)
        if name == "json":
            value = _schema(value, param)
        elif name == "json_object":
            value = None
        elif name == "choice":
            value = list(_texts(value, param))
            if not value:
                raise _refused(param, "must not be empty")
        elif name == "structural_tag":
            value = _tagged(value, param)
        elif not isinstance(value, str):
            raise _refused(param, f"must be a string, not {type(value).__name__}")
        return Structure(_KINDS[name], value, param, whitespace=not self.disable_any_whitespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Params that control sampling and where an answer ends. None means the model's recommendation
    (generation_config.json), else the value in the field's comment.

    Raises InvalidRequest, whose `param` names the field, for a value out of bounds.
    """

    n: int = 1  # answers per prompt
    temperature: float | None = None  # 1.0; 0 is greedy
    top_p: float | None = None  # 1.0
    top_k: int | None = None  # 0; 0 and -1 mean all tokens
    min_p: float | None = None  # 0.0
    repetition_penalty: float | None = None  # 1.0; over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    penalty_window: int = 0  # N: apply all penalties to the last N tokens of prompt and answer
    max_tokens: int | None = None  # None: the rest of the context
    min_tokens: int = 0
    stop: str | Sequence[str] = ()  # texts that end an answer and are removed from it
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # None: a random seed per request
    logprobs: int | None = None  # N: of each sampled token and the N likeliest
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()  # with logprobs: also of these tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()  # tokens that end the answer stay allowed; empty: all
    bad_words: Sequence[str] = ()  # texts that never occur in an answer
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # max thinking tokens of a reasoning model in a chat

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            kind: type[Any] = Integral if name in _INTEGERS else Real
            if value is None and name in _MAY_BE_NONE:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                noun = "a whole number" if kind is Integral else "a number"
                raise _refused(name, f"must be {noun}, not {value!r:.60}")
            if not allowed.has(value):
                raise _refused(name, f"must be {allowed}, not {str(value)[:40]}")
        for name in _TEXTS:
            if not all(_texts(getattr(self, name), name)):
                raise _refused(name, "contains an empty string")
        for name in _IDS:
            check_ids(getattr(self, name), name)
        if not isinstance(self.logit_bias, Mapping):
            raise _refused("logit_bias", f"must be a dict by token id, not {self.logit_bias!r:.60}")
        check_ids(list(self.logit_bias), "logit_bias")
        for bias in self.logit_bias.values():
            if not isinstance(bias, Real) or isinstance(bias, bool):
                raise _refused("logit_bias", f"contains {bias!r:.60}, which is not a number")
        structured_outputs = self.structured_outputs
        if structured_outputs is not None and not isinstance(
            structured_outputs, StructuredOutputsParams
        ):
            kind_name = type(structured_outputs).__name__
            raise _refused(
                "structured_outputs", f"must be StructuredOutputsParams, not {kind_name}"
            )

    def requested(self) -> RequestedSampling:
        """Return the params in the form that the gateway's modules take."""
        return RequestedSampling(
            stop=_texts(self.stop, "stop"),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            n=self.n,
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            bad_words=_texts(self.bad_words, "bad_words"),
            structure=self.structured_outputs.structure() if self.structured_outputs else None,
            thinking_budget=self.thinking_token_budget,
        )


_MAY_BE_NONE = frozenset(param.name for param in fields(SamplingParams) if param.default is None)


def check_ids(ids: Sequence[int], param: str) -> None:
    """Raise InvalidRequest unless `ids` is a sequence of integers; the engine checks them against
    the vocabulary."""
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise _refused(param, f"must be a list of token ids, not {ids!r:.60}")
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise _refused(param, f"contains {token!r:.60}, which is not a token id")


def _texts(value: str | Sequence[str], param: str) -> tuple[str, ...]:
    """Return texts as a tuple; a single text becomes a tuple of one. Raises InvalidRequest."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise _refused(param, f"must be a string or a list of strings, not {value!r:.60}")
    return tuple(value)


def _schema(value: Mapping[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _refused(param, f"is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise _refused(param, f"must be a JSON schema, not {value!r:.60}")
    return dict(value)


def _tagged(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or value.keys() != {"structures", "triggers"}:
        raise _refused(param, "must have structures and triggers, and nothing else")
    structures_param, tags = f"{param}.structures", value["structures"]
    if not isinstance(tags, list | tuple) or not all(
        isinstance(tag, Mapping) and tag.keys() == {"begin", "schema", "end"} for tag in tags
    ):
        raise _refused(
            structures_param, "must be a list; each has begin, schema and end, and nothing else"
        )
    if not all(isinstance(text, str) for tag in tags for text in (tag["begin"], tag["end"])):
        raise _refused(structures_param, "must each have a begin and an end that are strings")
    triggers = _texts(value["triggers"], f"{param}.triggers")
    if not tags or not triggers or not all(triggers):
        raise _refused(param, "must have structures and triggers that are not empty")
    structures = [
        {**tag, "schema": _schema(tag["schema"], f"{structures_param}.schema")} for tag in tags
    ]
    return {"structures": structures, "triggers": list(triggers)}


def _refused(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {message}", param)
