"""Kinds of workers that differ in little."""

from typing import Any

from pdserve.engine.kv.identity import KvIdentity
from pdserve.engine.kv.spec import KvSpec
from pdserve.services.router.fleet.worker_kind import WorkerKind


def kind(digest: bytes = b"a", **parts: Any) -> WorkerKind:
    """Of a worker whose KV another of this kind can take over TCP."""
    same: dict[str, Any] = {
        "wire_version": 1,
        "transports": ("tcp",),
        "layout": KvSpec(0, ()),
        "encrypts": False,
    }
    return WorkerKind(KvIdentity(digest), **(same | parts))
