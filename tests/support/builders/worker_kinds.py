"""Kinds of workers with small differences."""

from typing import Any

from pdserve.engine.kv.identity import KvIdentity
from pdserve.engine.kv.spec import KvSpec
from pdserve.services.router.fleet.worker import WorkerKind


def kind(digest: bytes = b"a", **parts: Any) -> WorkerKind:
    """Return the kind of a worker whose KV another one of this kind can receive over TCP."""
    same: dict[str, Any] = {
        "wire_version": 1,
        "transports": ("tcp",),
        "layout": KvSpec(0, ()),
        "encrypts": False,
    }
    return WorkerKind(KvIdentity(digest), **(same | parts))
