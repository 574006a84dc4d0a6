"""Kinds of workers with small differences."""

from typing import Any

from pdserve.engine.kv import KvIdentity, KvSpec
from pdserve.services.router.fleet import WorkerKind


def kind(digest: bytes = b"a", **parts: Any) -> WorkerKind:
    """Return the kind of a worker whose KV another one of this kind can receive over TCP."""
    same: dict[str, Any] = {
        "wire_version": 1,
        "transports": ("tcp",),
        "layout": KvSpec(0, ()),
        "encrypts": False,
    }
    return WorkerKind(KvIdentity(digest), **(same | parts))
