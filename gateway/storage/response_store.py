"""The interface by which /v1/responses keeps its responses, and finds them again."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response object, and the list of all items that it answers; both are JSON texts."""

    id: str
    response: str
    items: str

    @property
    def num_bytes(self) -> int:
        return len(self.response.encode()) + len(self.items.encode())


class ResponseStore(Protocol):
    """Keeps responses for a while, each for its tenant alone. Raises ServiceError UNAVAILABLE where
    it cannot be reached."""

    async def save(self, tenant: bytes, kept: KeptResponse) -> bool:
        """Keep one more; False: it is too large."""
        ...

    async def find(self, tenant: bytes, name: str) -> KeptResponse | None: ...

    async def remove(self, tenant: bytes, name: str) -> bool:
        """Whether there was one to forget."""
        ...
