"""Checks request bodies of this API: strict types, errors that name a field.

Unknown fields are ignored and named in the debug log, as in vLLM. gateway/http/fields.py says how
known fields that are not served are handled.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from pdserve.gateway.http.fields import (
    IGNORED,
    LEFT_OUT,
    OF_PROMPTS,
    OF_REQUESTS,
    REFUSED,
    refused_field,
)
from pdserve.gateway.http.validation import Priority, StrictModel, check_num_fields, parse_fields
from pdserve.gateway.requests.caller import MAX_SESSION, Caller
from pdserve.gateway.requests.members import Fate, note
from pdserve.gateway.sampling import refuse

_KNOWN = IGNORED | LEFT_OUT | OF_REQUESTS | REFUSED.keys()


class Body(StrictModel):
    """The body of a request, or a part of it."""

    # The names in REFUSED that are checked.
    checked: ClassVar[Collection[str]] = OF_PROMPTS


class OwnedBody(Body):
    """The body of a request that uses a model."""

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
    checked_fields = {name: value for name, value in body.items() if name in kind.checked}
    if refused := refused_field(checked_fields, kind.model_fields):
        raise refuse(*refused)
    note(Fate.LEFT_OUT, "fields", (name for name in LEFT_OUT if body.get(name)))
    return parse_fields(kind, body, _KNOWN)
