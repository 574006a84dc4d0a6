"""The version of the messages between gateway, router and workers, and which versions interoperate.

A release talks to the one before it, and so to the one after it (docs/upgrades.md).
"""

import logging
from urllib.parse import unquote

import grpc

from pdserve.protos.common_pb2 import INCOMPATIBLE_VERSION
from pdserve.services.common.errors import ServiceError

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_LOGGED_PEERS = 1024  # peers whose refusal has been logged


def incompatibility(peer_version: int, process: str, peer: str) -> str:
    """The reason why the process does not talk to its peer; empty if it does."""
    own_version = PROTOCOL_VERSION
    if abs(peer_version - own_version) <= 1:
        return ""
    older, needed_version = (
        (process, peer_version - 1) if own_version < peer_version else (peer, own_version - 1)
    )
    return (
        f"protocol version {own_version} of the {process} does not match {peer_version} of "
        f"the {peer}: upgrade the {older} to a release with version {needed_version} first"
    )


def check_version(peer_version: int, process: str, peer: str) -> None:
    """Raises ServiceError(INCOMPATIBLE_VERSION) if the process does not talk to its peer."""
    if text := incompatibility(peer_version, process, peer):
        raise ServiceError(INCOMPATIBLE_VERSION, text, "protocol")


def is_refusal(error: Exception) -> bool:
    """Whether a call ended because one end is too old or too new for the other."""
    if isinstance(error, grpc.RpcError):
        error = ServiceError.from_rpc(error)
    return isinstance(error, ServiceError) and error.code == INCOMPATIBLE_VERSION


class VersionGate:
    """Checks peers' versions at a server. A refused peer retries for as long as it lives; its
    refusal is logged once, unless MAX_LOGGED_PEERS others were refused meanwhile."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._logged_peers: dict[str, None] = {}  # the most recently refused last

    def check(self, peer_version: int, peer: str) -> None:
        """Raises ServiceError(INCOMPATIBLE_VERSION) if the peer is too old or too new."""
        try:
            check_version(peer_version, self._process, peer)
        except ServiceError as error:
            if peer not in self._logged_peers:
                log.warning("refused: %s", error)
            self._logged_peers.pop(peer, None)
            self._logged_peers[peer] = None
            if len(self._logged_peers) > MAX_LOGGED_PEERS:
                del self._logged_peers[next(iter(self._logged_peers))]
            raise
        self._logged_peers.pop(peer, None)


def host_of(peer: str) -> str:
    """The host of a gRPC call's peer; its port differs with every connection."""
    kind, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else peer
