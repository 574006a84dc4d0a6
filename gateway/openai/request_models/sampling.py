"""The fields that chat and plain completions share: sampling parameters, whose limits are in
gateway/sampling.py, and the required structure of the answer, in the forms of OpenAI, vLLM, SGLang
and llama.cpp.

A request has at most one structure. JSON schema keywords that cannot be enforced are refused by
name, except in OpenAI's json_schema without `strict`: there they are ignored, as in OpenAI.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import from_json

from pdserve.engine.api import BOUNDS, MAX_ENTRIES, MAX_STRUCTURE_CHARS
from pdserve.gateway.http.fields import REFUSED_FIELDS
from pdserve.gateway.http.thinking import thinking_budget
from pdserve.gateway.http.validation import ModelName, TokenLimit
from pdserve.gateway.openai.request_models import base
from pdserve.gateway.openai.request_models.base import Body, OwnedBody
from pdserve.gateway.sampling import PenaltyWindow, refuse, within_window
from pdserve.services.common.errors import MAX_QUOTED, cut
from pdserve.text import Kind, Structure

MAX_NAME = 64  # characters of a schema's name
MAX_TAGS = 256


def _parsed(value: Any) -> Any:
    """Convert a field that is JSON text to its value; other values are returned unchanged, and an
    empty text becomes None. Raises ValueError."""
    if not isinstance(value, str):
        return value
    if len(value) > 2 * MAX_STRUCTURE_CHARS:
        raise ValueError(f"must have at most {2 * MAX_STRUCTURE_CHARS} characters")
    try:
        return from_json(value, allow_inf_nan=False) if value else None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None


def _check_unset(value: Any) -> None:
    if value not in (None, False):
        raise ValueError("not supported by this server")


def _texts(value: Any) -> Any:
    """Check that all items of a list are strings. Stops at the first wrong item, since one error
    for each of many items takes long. Raises ValueError."""
    if isinstance(value, list) and not all(isinstance(text, str) for text in value):
        raise ValueError("must be a list of strings")
    return value


JsonText = BeforeValidator(_parsed)
Schema = Annotated[dict[str, Any] | bool | None, JsonText]
Choices = Annotated[list[str], Field(min_length=1), BeforeValidator(_texts)]
NotServed = Annotated[None, BeforeValidator(_check_unset)]


class TagBody(Body):
    """One tag of a structural tag: its opening text, the JSON schema of what follows, and its
    closing text."""

    begin: str = Field(min_length=1)
    content: dict[str, Any] | bool = Field(alias="schema")
    end: str


Tags = Annotated[list[TagBody], Field(min_length=1, max_length=MAX_TAGS)]
Trigger = Annotated[str, Field(min_length=1)]
Triggers = Annotated[list[Trigger], Field(min_length=1, max_length=MAX_TAGS)]


class StructuralTag(Body):
    """An answer of free text in which each tag contains JSON that matches the tag's schema, in the
    format that vLLM and SGLang share."""

    structures: Tags
    triggers: Triggers
    format: NotServed = None  # XGrammar's later form


Tag = Annotated[StructuralTag | None, JsonText]


class JsonSchemaFormat(Body):
    """The object `json_schema` of OpenAI's `response_format`."""

    name: str | None = Field(None, max_length=MAX_NAME)
    description: str | None = None
    content: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormatBody(Body):
    """OpenAI's `response_format`. As in llama.cpp and others, the type json_object may have a
    schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    content: Schema = Field(None, alias="schema")
    structures: Tags | None = None
    triggers: Triggers | None = None
    format: NotServed = None

    def structure(self, param: str) -> Structure | None:
        match self.type:
            case "text":
                return None
            case "json_object" if self.content is None:
                return Structure("json_object", None, param)
            case "json_object":
                return Structure("json_schema", self.content, param, path=f"{param}.schema")
            case "json_schema" if self.json_schema is None and self.content is not None:
                path = f"{param}.schema"
                return Structure("json_schema", self.content, param, lenient=True, path=path)
            case "json_schema":
                schema = self.json_schema
                if schema is None or schema.content is None:
                    missing_field = "json_schema.schema" if schema else "json_schema"
                    raise refuse(f"{param}.{missing_field}", f"{param}.{missing_field} is required")
                path = f"{param}.json_schema.schema"
                lenient = not schema.strict
                return Structure("json_schema", schema.content, param, lenient=lenient, path=path)
            case "structural_tag":
                for name in ("structures", "triggers"):
                    if getattr(self, name) is None:
                        raise refuse(f"{param}.{name}", f"{param}.{name} is required")
                return _tagged(self.structures or (), self.triggers or (), param)
            case _:
                types = "text, json_object, json_schema or structural_tag"
                raise refuse(f"{param}.type", f"{param}.type must be {types}")


def _tagged(tags: Sequence[TagBody], triggers: Sequence[str], param: str) -> Structure:
    structures = [
        {"begin": tag.begin, "schema": tag.content, "end": tag.end,
         "path": f"{param}.structures[{index}].schema"}
        for index, tag in enumerate(tags)
    ]  # fmt: skip
    value = {"structures": structures, "triggers": list(triggers)}
    return Structure("structural_tag", value, param)


_KINDS: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json_schema",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_WITHIN: dict[str, Kind] = {  # of StructuredOutputs
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


def _of_fields(
    kinds: Mapping[str, Kind], values: Mapping[str, Any], prefix: str, whitespace: bool
) -> Iterator[Structure]:
    """Yield the structure that each set field requests. `kinds` maps the field's name to the kind
    of structure; `prefix` is the place of the fields in the request. An empty text requests
    none."""
    for name, kind in kinds.items():
        value = values[name]
        if isinstance(value, StructuralTag):
            yield _tagged(value.structures, value.triggers, prefix + name)
        elif value not in (None, ""):
            yield Structure(kind, value, prefix + name, whitespace=whitespace)


class StructuredOutputs(Body):
    """vLLM's field `structured_outputs`: the required structure of the answer."""

    model_config = ConfigDict(extra="forbid")
    content: Schema = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Tag = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # there is only one implementation
    disable_additional_properties: NotServed = None
    whitespace_pattern: NotServed = None

    def structures(self, param: str) -> Iterator[Structure]:
        whitespace = not self.disable_any_whitespace
        values = {
            "json": self.content,
            **{n: getattr(self, n) for n in _WITHIN if n != "json"},
        }
        yield from _of_fields(_WITHIN, values, f"{param}.", whitespace=whitespace)
        if self.json_object:
            yield Structure("json_object", None, f"{param}.json_object", whitespace=whitespace)


class StructureFields(Body):
    """The fields of several servers' APIs that request a structured answer, such as JSON that
    matches a schema. Only one may be set."""

    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema = None
    grammar: str | None = None
    structural_tag: Tag = None
    constraint: str | None = None  # vLLM.rs: of the kind in constraint_type
    constraint_type: Literal["regex", "lark", "json_schema", "json"] | None = None

    def structure(self) -> Structure | None:
        """Return the structure that the request requires, None without one. Raises ServiceError if
        several fields request one."""
        structures = list(self._structures())
        if len(structures) > 1:
            first, second = structures[0].param, structures[1].param
            raise refuse(second, f"set either {first} or {second}, not both")
        return structures[0] if structures else None

    def _structures(self) -> Iterator[Structure]:
        if self.response_format is not None:
            structure = self.response_format.structure("response_format")
            if structure is not None:
                yield structure
        if self.structured_outputs is not None:
            yield from self.structured_outputs.structures("structured_outputs")
        values = {name: getattr(self, name) for name in _KINDS}
        yield from _of_fields(_KINDS, values, "", whitespace=True)
        if self.constraint:
            yield self._constraint(self.constraint)

    def _constraint(self, text: str) -> Structure:
        kind = self.constraint_type or "regex"
        if kind == "regex" or kind == "lark":
            return Structure(kind, text, "constraint")
        try:
            return Structure("json_schema", _parsed(text), "constraint")
        except ValueError as error:
            raise refuse("constraint", f"constraint: {error}") from None


_CONVERTED = {"penalty_window", "logit_bias", "max_tokens", "logprobs", "prompt_logprobs"}
# Fields with the same name and values in RequestedSampling.
_SAME_NAMES = (*(BOUNDS.keys() - _CONVERTED), "ignore_eos", "skip_special_tokens")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids")
# Names of one bound: vLLM; Qwen and SGLang; llama.cpp.
_THINKING = ("thinking_token_budget", "thinking_budget", "reasoning_budget")


def _stop(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
        return [stop for stop in value if stop]  # an empty one stops nothing
    raise ValueError("must be a string or a list of strings")


def _limited(name: str) -> BeforeValidator:
    """Return a validator that refuses a list or object with more than MAX_ENTRIES[name] items,
    before each item is checked, since one error for each of many items takes long."""
    limit = MAX_ENTRIES[name]

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise ValueError(f"at most {limit} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(StructureFields, OwnedBody):
    """The fields that chat and plain completions share: model, sampling, streaming and
    structure."""

    model_config = ConfigDict(json_schema_extra=base.completion)
    checked = REFUSED_FIELDS.keys()
    model: ModelName = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama.cpp's name for it
    repeat_last_n: PenaltyWindow = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _limited("logit_bias")] = None
    seed: int | None = None
    stop: Annotated[Any, AfterValidator(_stop), WithJsonSchema(base.STOP)] = Field(
        None, validate_default=True
    )
    stop_token_ids: Annotated[list[int] | None, _limited("stop_token_ids")] = None
    allowed_token_ids: Annotated[list[int] | None, _limited("allowed_token_ids")] = None
    bad_words: Annotated[list[str] | None, _limited("bad_words")] = None
    logprob_token_ids: Annotated[list[int] | None, _limited("logprob_token_ids")] = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    reasoning_budget: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: TokenLimit = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether every chunk of a stream has the token counts so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def _shared(self) -> dict[str, Any]:
        """Return the arguments of RequestedSampling that do not differ between chats and
        completions; fields that are null are left out. Raises ServiceError for fields that
        contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise refuse("prompt_logprobs", "prompt_logprobs cannot be combined with stream: true")
        values = {name: getattr(self, name) for name in _SAME_NAMES}
        if self.repeat_penalty is not None:
            if self.repetition_penalty not in (None, self.repeat_penalty):
                raise refuse(
                    "repeat_penalty", "set either repetition_penalty or repeat_penalty, not both"
                )
            values["repetition_penalty"] = self.repeat_penalty
            values["repetition_penalty_field"] = "repeat_penalty"
        penalties = {name: values[name] for name in PENALTIES if values[name] is not None}
        values |= within_window(penalties, self.repeat_last_n)
        return {
            **{name: value for name, value in values.items() if value is not None},
            **{name: tuple(getattr(self, name) or ()) for name in _LISTS},
            "logit_bias": _biases(self.logit_bias or {}),
            "include_stop": bool(self.include_stop_str_in_output),
            "structure": self.structure(),
            **thinking_budget(self._bounds_of_thinking()),
        }

    def _bounds_of_thinking(self) -> dict[str, int]:
        """Return the limits on reasoning tokens that the body sets, by the name of the field."""
        values = {name: getattr(self, name) for name in _THINKING}
        return {name: value for name, value in values.items() if value is not None}


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    invalid = [t for t in biases if not (t.isascii() and t.isdecimal() and len(t) <= 10)]
    if invalid:
        names = ", ".join(f"{token[:40]!r}" for token in invalid)
        problem = "is not a token id" if len(invalid) == 1 else "are not token ids"
        raise refuse("logit_bias", cut(f"logit_bias: {names} {problem}", MAX_QUOTED))
    return {int(token): bias for token, bias in biases.items()}
