"""Sampling params of the Python API, with vLLM's names.

The class of the same name in engine/api/request.py is the engine's version: token ids in place of
texts, a compiled grammar, and no None.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args

from pdserve.engine.api import ClientParams, ContextLengthExceeded, InvalidRequest
from pdserve.text import (
    ID_LISTS,
    ContextExceeded,
    Kind,
    RequestedSampling,
    Structure,
    TextError,
    check_sampling,
)

_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


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
    _structure: Structure = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Parse the field that is set. Raises InvalidRequest."""
        names = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(names) != 1:
            names_text = " and ".join(names) or "none"
            raise _refused(
                "structured_outputs", f"needs one of {', '.join(_KINDS)}, not {names_text}"
            )
        object.__setattr__(self, "_structure", self._parsed(names[0]))

    def structure(self) -> Structure:
        """Return the Structure that the grammar compiler takes."""
        return self._structure

    def _parsed(self, name: str) -> Structure:
        """Return the value of a field as a Structure. Raises InvalidRequest."""
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
class SamplingParams(ClientParams):
    """Params that control sampling and where an answer ends. None means the model's recommendation
    (generation_config.json), else the default in docs/python.md.

    Raises InvalidRequest, whose `param` names the field, for a value out of bounds.
    """

    stop: str | Sequence[str] = ()  # texts that end an answer and are removed from it
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # None: a random seed per request
    bad_words: str | Sequence[str] = ()  # texts that never occur in an answer
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # max thinking tokens of a reasoning model in a chat

    def __post_init__(self) -> None:
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                noun = "a whole number" if kind is Integral else "a number"
                raise _refused(name, f"must be {noun}, not {value!r:.60}")
        for name in ID_LISTS:
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
        with invalid_requests():
            check_sampling(self.requested())

    def requested(self) -> RequestedSampling:
        """Return the params in the form that all APIs share."""
        params = {item.name: getattr(self, item.name) for item in fields(ClientParams)}
        params["logit_bias"] = dict(self.logit_bias)  # the caller may change its own
        return RequestedSampling(
            **params,
            stop=tuple(filter(None, _texts(self.stop, "stop"))),  # an empty one stops nothing
            seed=self.seed,
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            bad_words=_texts(self.bad_words, "bad_words"),
            structure=self.structured_outputs.structure() if self.structured_outputs else None,
            thinking_budget=self.thinking_token_budget,
        )


def _numbers() -> Iterator[tuple[str, type[Any]]]:
    """Yield the names of SamplingParams' numbers, and the type of each."""
    for item in fields(SamplingParams):
        kinds = get_args(item.type) if isinstance(item.type, UnionType) else (item.type,)
        if int in kinds or float in kinds:
            yield item.name, Integral if int in kinds else Real


_NUMBERS: dict[str, type[Any]] = dict(_numbers())
_MAY_BE_NONE = frozenset(item.name for item in fields(SamplingParams) if item.default is None)


def requested(params: SamplingParams | None = None) -> RequestedSampling:
    """Return a caller's params in the form that all APIs share; None requests the defaults. Raises
    TypeError."""
    if params is None:
        return RequestedSampling()
    if not isinstance(params, SamplingParams):
        kind = type(params)
        name = f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"sampling_params must be pdserve.SamplingParams, not {name}")
    return params.requested()


@contextmanager
def invalid_requests() -> Iterator[None]:
    """Convert a TextError to the engine's error for such a request: InvalidRequest, or
    ContextLengthExceeded."""
    try:
        yield
    except ContextExceeded as error:
        raise ContextLengthExceeded(str(error), error.param) from None
    except TextError as error:
        raise InvalidRequest(str(error), error.param) from None


def check_ids(ids: Sequence[int], param: str) -> None:
    """Raise InvalidRequest unless `ids` is a sequence of integers. Whether the vocabulary has them
    is checked when a model gets the request."""
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
