"""Grammars that wait to be compiled: tenants take turns, and whoever leaves is taken out."""

import threading
from collections import OrderedDict, deque
from concurrent.futures import Future

from pdserve.engine.constraints.grammars.compiled import CompiledGrammar

MAX_QUEUED = 64
MAX_QUEUED_OF_TENANT = 32

Compilation = Future[CompiledGrammar]


class CompileQueue:
    """Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The tenant whose turn is next comes first; one without grammars is not here.
        self._tenants: OrderedDict[bytes, deque[tuple[str, Compilation]]] = OrderedDict()

    def has_room(self, tenant: bytes) -> bool:
        """Whether another grammar of this tenant may wait."""
        with self._lock:
            total = sum(map(len, self._tenants.values()))
            own = len(self._tenants.get(tenant, ()))
        return total < MAX_QUEUED and own < MAX_QUEUED_OF_TENANT

    def add(self, tenant: bytes, source: str) -> Compilation:
        """The future is the caller's to cancel, by `remove`."""
        made = Compilation()
        with self._lock:
            self._tenants.setdefault(tenant, deque()).append((source, made))
        return made

    def pop(self) -> tuple[str, Compilation] | None:
        """The next one, which can be cancelled no more; None if there is none."""
        with self._lock:
            for tenant, waiting in self._tenants.items():
                source, made = waiting.popleft()
                del self._tenants[tenant]
                if waiting:
                    self._tenants[tenant] = waiting  # behind the others
                made.set_running_or_notify_cancel()
                return source, made
        return None

    def remove(self, made: Compilation) -> None:
        """Cancels one that still waits."""
        with self._lock:
            for tenant, waiting in self._tenants.items():
                left = deque(entry for entry in waiting if entry[1] is not made)
                if len(left) < len(waiting):
                    self._tenants[tenant] = left
                    if not left:
                        del self._tenants[tenant]
                    break
            else:
                return
        made.cancel()

    def clear(self) -> None:
        """Cancels all that wait."""
        with self._lock:
            found = [made for waiting in self._tenants.values() for _, made in waiting]
            self._tenants.clear()
        for made in found:
            made.cancel()
