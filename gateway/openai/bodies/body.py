"""Checks request bodies of this API: strict types, errors that name a field.

Unknown fields are ignored and named in the debug log, as in vLLM. fields.py says how known fields
that are not served are handled.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from pdserve.gateway.http.validation import Priority, StrictModel, check_num_fields, parse_fields
from pdserve.gateway.openai.bodies.fields import (
    IGNORED,
    LEFT_OUT,
    OF_PROMPTS,
    OF_REQUESTS,
    REFUSED,
    refused_field,
)
from pdserve.gateway.requests.caller import MAX_SESSION, Caller
from pdserve.gateway.requests.members import Fate, note
from pdserve.gateway.sampling import refuse

_KNOWN = IGNORED | LEFT_OUT | OF_REQUESTS | REFUSED.keys()


class Body(StrictModel):
    """Of a request, or a part of one."""

    generates: ClassVar[bool] = False  # False: only fields that change a prompt are checked


class OwnedBody(Body):
    """Of a request that uses a model."""

    session_id: str | None = Field(None, max_length=MAX_SESSION)
    user: Any = None
    priority: Priority | None = None

    def called_by(self, caller: Caller, request_id: str) -> Caller:
        """Return the caller with the session under which its usage is counted."""
        return caller.of_body(request_id, self.session_id, self.user)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: Mapping[str, Any]) -> B:
    """Parse a body. Raises ServiceError INVALID_ARGUMENT naming the first wrong field."""
    check_num_fields(body)
    asked = body if kind.generates else {k: v for k, v in body.items() if k in OF_PROMPTS}
    if refused := refused_field(asked, kind.model_fields):
        raise refuse(*refused)
    note(Fate.LEFT_OUT, "fields", (name for name in LEFT_OUT if body.get(name)))
    return parse_fields(kind, body, _KNOWN)
