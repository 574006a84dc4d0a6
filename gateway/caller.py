"""A Caller says whose a request is, and which ids it has."""

from contextlib import ExitStack
from dataclasses import dataclass, field

from pdserve.services.host.tenants.keys import EVERYBODY, Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """`request_id` names a request everywhere, `client_id` is what its client calls it, if it
    does. `headers` are added to the response, `at_end` is run when it is complete."""

    request_id: str
    client_id: str = ""
    tenant: Tenant = EVERYBODY
    headers: dict[str, str] = field(default_factory=dict, compare=False)
    at_end: ExitStack = field(default_factory=ExitStack, compare=False)

    @property
    def shown_id(self) -> str:
        """The id that the response has."""
        return self.client_id or self.request_id
