"""How the bodies of this API's requests are checked: strict types, errors that name a field.

Unknown fields are ignored and named in the debug log, as vLLM does. What becomes of known ones that
are not served is in fields.py.
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.gateway.openai.bodies.fields import IGNORED, OF_PROMPTS, REFUSED, refused_field
from pdserve.gateway.sampling import refuse
from pdserve.services.host.errors import MAX_QUOTED, ServiceError, cut

log = logging.getLogger("pdserve.gateway.http")

MAX_FIELDS = 1024  # of a body, unknown ones too
MAX_LOGGED_NAMES = 20  # unknown fields that are named in the log


class Body(BaseModel):
    """Strict types: no "5" for 5, no true for 1, no NaN."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    generates: ClassVar[bool] = False  # otherwise only what changes a prompt is looked at


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: Mapping[str, Any]) -> B:
    """Raises ServiceError INVALID_ARGUMENT naming the first wrong field as OpenAI writes it."""
    if len(body) > MAX_FIELDS:
        raise refuse("", f"the body has {len(body)} fields, at most {MAX_FIELDS}")
    model = kind.model_fields.get("model")
    if model is not None and model.is_required() and body.get("model") in (None, ""):
        raise refuse("model", "you must provide a model parameter")
    asked = body if kind.generates else {k: v for k, v in body.items() if k in OF_PROMPTS}
    if refused := refused_field(asked, kind.model_fields):
        raise refuse(*refused)
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None
    unknown = sorted(set(body) - kind.model_fields.keys() - IGNORED - REFUSED.keys())
    if unknown:
        names = ", ".join(repr(name[:40]) for name in unknown[:MAX_LOGGED_NAMES])
        log.debug("ignored %d unknown fields: %s", len(unknown), names)
    return parsed


def _first_error(error: ValidationError) -> ServiceError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    param = cut(param, MAX_QUOTED)  # it may have a key of the client's
    if first["type"] == "missing":
        return refuse(param, f"{param} is required")
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return refuse(param, f"{param}: {message.removeprefix('input ')}")
