"""The version of the messages between gateway, router and workers, and which versions interoperate.

A release talks to the one before it, and so to the one after it (docs/upgrades.md). Messages
without a version (0) are those of pdserve 0.1.0.
"""

import logging
from urllib.parse import unquote

import grpc

from pdserve.protos.common_pb2 import INCOMPATIBLE_VERSION
from pdserve.services.host.errors import ServiceError

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_TOLD = 1024  # peers whose refusal has been logged


def incompatibility(theirs: int, here: str, there: str) -> str:
    """The reason why process `here` does not talk to process `there`; empty if it does."""
    ours = PROTOCOL_VERSION
    if abs(theirs - ours) <= 1:
        return ""
    older, version = (here, theirs - 1) if ours < theirs else (there, ours - 1)
    return (
        f"protocol version {ours} here ({here}), {theirs} there ({there}): "
        f"upgrade the {older} to a release with version {version} first"
    )


def check_version(theirs: int, here: str, there: str) -> None:
    """Raises ServiceError(INCOMPATIBLE_VERSION) if process `here` does not talk to `there`."""
    if text := incompatibility(theirs, here, there):
        raise ServiceError(INCOMPATIBLE_VERSION, text, "protocol")


def is_refusal(error: Exception) -> bool:
    """Whether a call ended because one end is too old or too new for the other."""
    if isinstance(error, grpc.RpcError):
        error = ServiceError.from_rpc(error)
    return isinstance(error, ServiceError) and error.code == INCOMPATIBLE_VERSION


class VersionGate:
    """Checks peers' versions at a server. A refused peer retries for as long as it lives; its
    refusal is logged once, unless MAX_TOLD others were refused meanwhile."""

    def __init__(self, here: str) -> None:
        self._here = here
        self._told: dict[str, None] = {}  # the most recently refused last

    def check(self, theirs: int, there: str) -> None:
        """Raises ServiceError(INCOMPATIBLE_VERSION) if the peer is too old or too new."""
        try:
            check_version(theirs, self._here, there)
        except ServiceError as error:
            if there not in self._told:
                log.warning("refused: %s", error)
            self._told.pop(there, None)
            self._told[there] = None
            if len(self._told) > MAX_TOLD:
                del self._told[next(iter(self._told))]
            raise
        self._told.pop(there, None)


def host_of(peer: str) -> str:
    """The host of a gRPC call's peer; its port differs with every connection."""
    kind, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else peer
