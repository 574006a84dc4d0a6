"""The interface with which /v1/responses stores and finds responses."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response object, and the list of all items that it responds to; both are JSON texts."""

    id: str
    response: str
    items: str

    @property
    def num_bytes(self) -> int:
        return len(self.response.encode()) + len(self.items.encode())


class ResponseStore(Protocol):
    """Keeps responses for a while, separately for each tenant. Raises ServiceError UNAVAILABLE if
    the store cannot be reached."""

    async def save(self, tenant: bytes, record: KeptResponse) -> bool:
        """Store a response; False if it is too large."""
        ...

    async def find(self, tenant: bytes, name: str) -> KeptResponse | None: ...

    async def remove(self, tenant: bytes, name: str) -> bool:
        """Remove a response; return whether it existed."""
        ...
