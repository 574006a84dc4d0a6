"""Print docs/api.md, generated from the code.

`make docs` writes the page; tests/gateway/openai/test_api_page.py compares it and checks it against
a running application. A further route is an entry of ROUTES.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from pdserve.gateway.anthropic import conversation as anthropic_types
from pdserve.gateway.anthropic import request_models as anthropic
from pdserve.gateway.anthropic.request_models import CountBody, MessagesBody
from pdserve.gateway.http import fields
from pdserve.gateway.http.fields import NEUTRAL_VALUES, EntryType, EntryTypes, Handling
from pdserve.gateway.ollama import request_models as ollama
from pdserve.gateway.ollama.request_models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from pdserve.gateway.openai import EmbeddingBody
from pdserve.gateway.openai.request_models import (
    Body,
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
    TokenizeChatBody,
)
from pdserve.gateway.openai.request_models import base as chat_types
from pdserve.gateway.openai.response_models import FileUpload
from pdserve.gateway.openai.responses import request_model as responses
from pdserve.gateway.openai.responses import tools as responses_types
from pdserve.gateway.openai.responses.request_model import InputTokensBody, ResponsesBody
from pdserve.gateway.openai.stored.routes import BatchBody
from pdserve.gateway.rerank.api import RerankBody, ScoreBody

HEAD = """\
# Fields of the API

`make docs` writes this page from the code, and a test sends each field to a running gateway
(tests/gateway/openai/test_api_page.py). `/openapi.json` of a gateway describes the answers too, and
`/docs` shows it.

A field is served; or refused with a 400 that names it, because it would change the answer; or
ignored, because it changes no answer here; or left out and logged, because it offers what cannot be
run here. A refused field may be null, or have the values that stand beside it; where none stand
there, false and what is empty, which ask for nothing. Fields that are in no table are ignored, and
named in the debug log.

`model` may be left out where one model is served. `max_tokens` and its other names are bounds: an
answer ends with the context, unless the gateway has `--strict-max-tokens`. Integers may be written
as `16.0`.

`repeat_last_n` is the window of penalties, as in llama.cpp: repetition, presence and frequency
penalties count the last tokens of prompt and answer together, as many as it says; more than the
context are all of them. 0 turns penalties off. Without it, and with -1, the repetition penalty is
over prompt and answer, and the other two are over the answer alone.

If a chat template refuses a reasoning effort, the template gets the nearest effort that it accepts,
or none. The efforts `auto` and `default` leave the choice to the template.

The answer continues the last message of the assistant if that has `prefix` or `partial`, or the
body `continue_final_message`.

A tool's name has up to 128 letters, digits and `_ - .`. The input of a custom tool is kept to its
regular expression; its Lark grammar is only shown to the model.

Roles, content, tools and items follow one rule on every route:

- What would change the answer and cannot be honoured is refused by name.
- A tool that is offered to the model and cannot be run here, such as a provider's web search, is
  left out and named in the log, and so is a field that offers it (`mcp_servers`,
  `web_search_options`). A tool choice that asks for it is refused.
- History is kept as text, or dropped and named in the log where it says nothing to a model here.
- A hint is taken, whatever its value.

Below the fields of /v1/chat/completions, /v1/responses and /v1/messages are the types of roles,
content, tools and items, as the packages of OpenAI and Anthropic have them
(tests/gateway/test_unions.py compares). Of types that are in no table, a tool is left out, an item
is kept as text, a call is dropped, a part or block is dropped from a message of the assistant and
refused elsewhere, and a role or a tool choice is refused.
"""
SHORT = "The route is there without `/v1`, too."
STREAMED = (
    "It streams unless `stream` is false. Of `options`, "
    + ", ".join(f"`{name}`" for name in sorted(ollama.IGNORED_OPTIONS))
    + " are ignored; `mirostat`, `tfs_z`, `typical_p` and what /v1/completions refuses are refused "
    "unless their values change nothing."
)
SERVED, IGNORED, REFUSED = "served", "ignored", "refused"
LEFT_OUT = Handling.LEFT_OUT.value
USUAL = {repr(value) for value in NEUTRAL_VALUES}


@dataclass(frozen=True)
class Route:
    """The fields of a route. `refused` has the no-op values that are accepted by field,
    `other_names` the field to use instead of another."""

    path: str
    bodies: tuple[type[BaseModel], ...]
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: Collection[str] = ()
    left_out: Collection[str] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    unions: Mapping[str, EntryTypes] = field(default_factory=dict)


def _openai(
    path: str,
    *bodies: type[Body],
    remark: str = "",
    unions: Mapping[str, EntryTypes] = MappingProxyType({}),
) -> Route:
    """A route of gateway/openai, whose fields are those of fields.py."""
    served = {name for body in bodies for name in _served_by(body)}
    refused = {name: (None,) for body in bodies for name in body.model_fields.keys() - served}
    ignored = fields.REQUEST_FIELDS - served
    checked = bodies[0].checked
    refused |= {name: fields.REFUSED_FIELDS[name] for name in checked if name not in served}
    if checked is fields.PROMPT_FIELDS:
        return Route(path, bodies, refused, ignored, remark=remark)
    ignored |= fields.IGNORED_FIELDS
    left_out, names = fields.OMITTED_FIELDS, fields.FIELD_ALIASES
    return Route(path, bodies, refused, ignored, left_out, names, remark, unions)


def _other(
    path: str,
    body: type[BaseModel],
    table: Any,
    ignored: Collection[str] = (),
    *,
    remark: str = "",
    unions: Mapping[str, EntryTypes] = MappingProxyType({}),
) -> Route:
    """A route with a separate table of fields."""
    served = _served_by(body)
    ignored = {*table.IGNORED_FIELDS, *ignored} - served
    left_out = getattr(table, "OMITTED_FIELDS", ())
    refused = {n: values for n, values in table.REFUSED_FIELDS.items() if n not in served | ignored}
    return Route(path, (body,), refused, ignored, left_out, table.FIELD_ALIASES, remark, unions)


def _served_by(body: type[BaseModel]) -> set[str]:
    """The served fields; a field that can only be null is not served."""
    return {
        field.alias or name
        for name, field in body.model_fields.items()
        if field.annotation is not type(None)
    }


ROUTES = (
    _openai("/v1/chat/completions", ChatBody, remark=SHORT, unions=chat_types.UNIONS),
    _openai(
        "/v1/chat/completions/batch", ChatBatchBody,
        remark="`messages` is a list of conversations, and each gets one choice.",
    ),
    _openai(
        "/v1/completions", CompletionBody,
        remark=f"It takes either `prompt` or `prompt_token_ids`. {SHORT}",
    ),
    _other(
        "/v1/responses", ResponsesBody, responses,
        remark=SHORT,
        unions=responses_types.UNIONS,
    ),
    _other("/v1/responses/input_tokens", InputTokensBody, responses, ResponsesBody.model_fields),
    _openai("/v1/embeddings", EmbeddingBody, remark=SHORT),
    _openai(
        "/rerank", RerankBody,
        remark="`/v1/rerank` is the same; `/v2/rerank` answers as Cohere does, without documents "
        "unless `return_documents` is true.",
    ),
    _openai(
        "/score", ScoreBody,
        remark="`/v1/score` is the same. It takes one pair of texts: `text_1` and `text_2`, "
        "`queries` and `documents`, `queries` and `items`, or `data_1` and `data_2`.",
    ),
    _other(
        "/v1/messages", MessagesBody, anthropic,
        remark="`context_management` is a hint, since prompts are never shortened. The last effort "
        "in the `output_config` of a system message replaces the request's. A system message whose "
        "`clear_at` is `next_user_message` is left out once a message of the user follows.",
        unions=anthropic_types.UNIONS,
    ),
    _other("/v1/messages/count_tokens", CountBody, anthropic, MessagesBody.model_fields),
    _other("/api/chat", OllamaChatBody, ollama, remark=STREAMED),
    _other("/api/generate", OllamaGenerateBody, ollama, remark=STREAMED),
    *(
        Route(path, (body,), ollama.UNSERVED_FIELDS, ollama.IGNORED_FIELDS - _served_by(body))
        for path, body in (
            ("/api/embed", OllamaEmbedBody),
            ("/api/embeddings", OllamaEmbeddingsBody),
            ("/api/show", OllamaShowBody),
        )
    ),
    _openai(
        "/tokenize", TokenizeBody, TokenizeChatBody,
        remark="It takes either `prompt` or `messages`. The fields of a completion that change no "
        "prompt are ignored.",
    ),
    _openai("/detokenize", DetokenizeBody),
    _openai(
        "/apply-template", TemplateBody,
        remark="The fields of a completion that change no prompt are ignored.",
    ),
    Route("/v1/files", (FileUpload,), {"expires_after": ()}, remark="The body is a form."),
    _openai("/v1/batches", BatchBody),
)  # fmt: skip


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD.rstrip()
    for route in ROUTES:
        yield f"\n## POST {route.path}\n"
        if route.remark:
            yield f"{route.remark}\n"
        yield "| field | value | here |"
        yield "|---|---|---|"
        for name, value in _served(route):
            yield f"| `{name}` | {value} | {SERVED} |"
        for name in sorted(route.ignored):
            yield f"| `{name}` | | {IGNORED} |"
        for name in sorted(route.left_out):
            yield f"| `{name}` | | {LEFT_OUT} |"
        for name, taken in sorted(route.refused.items()):
            yield f"| `{name}` | {_taken(taken)} | {REFUSED}{_instead(route, name)} |"
        for title, table in route.unions.items():
            yield f"\n### {title[0].upper()}{title[1:]} of {route.path}\n"
            yield "| type | here |"
            yield "|---|---|"
            for name, entry_type in sorted(table.items(), key=_place):
                yield f"| `{name}` | {entry_type.handling}{_texts(entry_type)} |"


def _place(row: tuple[str, EntryType]) -> tuple[int, str]:
    name, entry_type = row
    return list(Handling).index(entry_type.handling), name


def _texts(entry_type: EntryType) -> str:
    return f": {', '.join(f'`{name}`' for name in entry_type.text)}" if entry_type.text else ""


def _served(route: Route) -> Iterator[tuple[str, str]]:
    seen = set()
    for body in route.bodies:
        served = _served_by(body)
        schema = body.model_json_schema()
        required = schema.get("required", ())
        for name, value in schema["properties"].items():
            if name in served and name not in seen:
                seen.add(name)
                said = _kind(value, schema.get("$defs", {}))
                needed = name in required and len(route.bodies) == 1
                yield name, f"{said}; required" if needed else said


def _kind(schema: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """A JSON schema in words; null is omitted, since every optional field accepts it."""
    if "$ref" in schema:
        return _object(models[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        kinds = [_kind(one, models) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(kinds)
    if schema.get("format") == "binary":
        return "file"
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type", "any value")
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_kind(schema.get('items', {}), models)}{most}"
    return f"{kind}{_range(schema)}"


def _object(schema: Mapping[str, Any]) -> str:
    return "object of " + ", ".join(f"`{name}`" for name in schema["properties"])


def _range(schema: Mapping[str, Any]) -> str:
    low, above, high = (schema.get(k) for k in ("minimum", "exclusiveMinimum", "maximum"))
    found = []
    if low is not None:
        found.append(f"from {_number(low)}")
    if above is not None:
        found.append(f"above {_number(above)}")
    if high is not None:
        found.append(f"to {_number(high)}")
    if "maxLength" in schema:
        found.append(f"of at most {schema['maxLength']} characters")
    return (" " + " ".join(found)) if found else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _taken(values: tuple[Any, ...]) -> str:
    """The accepted no-op values of a refused field, unless they are the usual ones."""
    if values == (None,):
        return "but `null`"
    unusual = [value for value in values if repr(value) not in USUAL]
    return f"but {', '.join(f'`{json.dumps(value)}`' for value in unusual)}" if unusual else ""


def _instead(route: Route, name: str) -> str:
    other = route.other_names.get(name)
    if other is None:
        return ""
    first = other.partition(".")[0].partition(" ")[0]
    served = {name for body in route.bodies for name in _served_by(body)}
    return f"; use `{other}`" if first in served else ""


if __name__ == "__main__":
    print(page(), end="")
