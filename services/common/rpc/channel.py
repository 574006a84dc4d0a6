"""gRPC connections between processes: their options, advertised addresses, protocol versions, and
the sending of long lists of token ids.

A release can talk to the release before it and to the one after it (docs/upgrades.md). Long lists
of ids are sent in parts, so that no message exceeds 256 KiB.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote

import grpc
import grpc.aio

from pdserve.protos import common_pb2 as pb
from pdserve.protos.common_pb2 import INCOMPATIBLE_VERSION
from pdserve.services.common.errors import ServiceError

AUTHORIZATION = "authorization"
MAX_MESSAGE_BYTES = 4 << 20
CONNECT_MS = 2_000  # a busy or distant peer takes its time to send its HTTP/2 settings

# Options that both ends set: message limits, and pings that detect a dead peer in 15 s. Bandwidth
# probes are off, since each small message on an idle connection would cause one; so a stream has at
# most 64 KiB in flight, and KV, which is large, uses separate connections.
MESSAGE_LIMITS = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *MESSAGE_LIMITS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # time limit of one attempt, not a pause
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel, closed with it
]


log = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
MAX_LOGGED_PEERS = 1024  # peers whose refusal has been logged


IDS_PER_MESSAGE = 32_768  # a varint of a uint32 has at most 5 bytes: 160 KiB


@contextmanager
def may_be_closed() -> Iterator[None]:
    """A context for gRPC calls on a channel that another task may close, because the peer is lost.
    Raises ConnectionError if the channel is closed; gRPC itself would raise CancelledError in the
    calling task."""
    try:
        yield
    except grpc.aio.UsageError as error:  # closed before the call
        raise ConnectionError(
            "the connection to the other process was closed before the call"
        ) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionError(
            "the connection to the other process was closed during the call"
        ) from None


def advertised(bound: str, advertise: str = "") -> str:
    """Return the host:port at which other processes reach a server that listens at `bound`. This is
    `advertise` if it is set; if its port is missing or 0, the bound port replaces it. Otherwise it
    is `bound`, with this machine's address in place of a wildcard host such as 0.0.0.0."""
    host, _, port = bound.rpartition(":")
    if advertise:
        advertised_host, colon, advertised_port = advertise.rpartition(":")
        if not colon or "]" in advertised_port:
            return f"{advertise}:{port}"
        return f"{advertised_host}:{advertised_port if advertised_port not in ('', '0') else port}"
    try:
        wildcard = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        wildcard = False
    return f"{_machine_address()}:{port}" if wildcard else bound


def _machine_address() -> str:
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return name
    return str(infos[0][4][0])


def incompatibility(peer_version: int, process: str, peer: str) -> str:
    """Return why a process of this release cannot exchange messages with a peer of that protocol
    version; empty if it can. `process` and `peer` are the names of the two in the text. No release
    has version 0: the peer has not set the field."""
    own_version = PROTOCOL_VERSION
    if peer_version and abs(peer_version - own_version) <= 1:
        return ""
    older, needed_version = (
        (process, peer_version - 1)
        if own_version < peer_version
        else (peer, max(1, own_version - 1))
    )
    return (
        f"protocol version {own_version} of the {process} does not match {peer_version} of "
        f"the {peer}: upgrade the {older} to a release with version {needed_version} first"
    )


def check_version(peer_version: int, process: str, peer: str) -> None:
    """Raise ServiceError INCOMPATIBLE_VERSION if the peer's protocol version is too old or too new
    for this process."""
    if text := incompatibility(peer_version, process, peer):
        raise ServiceError(INCOMPATIBLE_VERSION, text, "protocol")


def is_refusal(error: Exception) -> bool:
    """Return whether a call failed because the protocol version of the caller or of the server is
    too old for the other."""
    if isinstance(error, grpc.RpcError):
        error = ServiceError.from_rpc(error)
    return isinstance(error, ServiceError) and error.code == INCOMPATIBLE_VERSION


class VersionGate:
    """Checks the protocol version of each peer that connects to a server. A refused peer keeps
    retrying, so its refusal is logged only once, unless more than MAX_LOGGED_PEERS other peers were
    refused in between."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._logged_peers: dict[str, None] = {}  # the most recently refused last

    def check(self, peer_version: int, peer: str) -> None:
        """Raise ServiceError INCOMPATIBLE_VERSION, and log it, if the peer's protocol version is
        too old or too new."""
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
    """Return the host in gRPC's name of a call's peer, without the port, which differs with every
    connection."""
    kind, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else peer


def send_ids(key: str, ids: Sequence[int]) -> tuple[list[pb.IdsPart], Sequence[int]]:
    """Split a list of token ids that may be too long for one message. Returns the IdsParts to send
    before the message, in order, and the remaining ids, which go into the message itself."""
    split_at = max(0, len(ids) - 1) // IDS_PER_MESSAGE * IDS_PER_MESSAGE
    parts = [
        pb.IdsPart(key=key, ids=ids[start : start + IDS_PER_MESSAGE])
        for start in range(0, split_at, IDS_PER_MESSAGE)
    ]
    return parts, ids[split_at:]


class IdsCollector:
    """Collects token ids that a peer sends in parts before the message that they belong to. Each
    stream of messages has one collector.

    The total ids and the number of lists are limited. A list beyond the limit of ids is never
    returned incomplete: `take` raises for it. Beyond the limit of lists, refused keys cannot be
    remembered either, so every later `take` raises.
    """

    def __init__(self, max_ids: int = 4 << 20, max_keys: int = 1024) -> None:
        self._max_ids = max_ids
        self._max_keys = max_keys
        self._num_ids = 0
        self._flooded = False
        self._parts: dict[str, list[int] | None] = {}  # None: refused

    def add(self, part: pb.IdsPart) -> None:
        """Keep a part of a list. Raises ServiceError OVERLOADED if a limit is exceeded, and from
        then on for every part with its key, until the key is taken or dropped."""
        if part.key not in self._parts and len(self._parts) >= self._max_keys:
            self._flooded = True
            raise ServiceError(
                pb.OVERLOADED,
                f"more than {self._max_keys} long prompts are being received at once; retry later",
            )
        ids = self._parts.setdefault(part.key, [])
        if ids is None or self._num_ids + len(part.ids) > self._max_ids or not part.ids:
            self.drop(part.key)
            self._parts[part.key] = None
            raise ServiceError(
                pb.OVERLOADED,
                f"the long prompts being received at once have more than {self._max_ids} tokens in "
                "total; retry later",
            )
        ids.extend(part.ids)
        self._num_ids += len(part.ids)

    def collect(self, part: pb.IdsPart) -> None:
        """Keep a part of a list. If a limit is exceeded, log it instead of raising; `take` will
        raise for the part's key."""
        try:
            self.add(part)
        except ServiceError as error:
            log.warning("%s", error)

    def take(self, key: str, tail: Sequence[int]) -> list[int]:
        """Return the whole list of ids with this key, the collected parts and then `tail` (the ids
        in the message itself), and forget the parts.

        Raises ServiceError OVERLOADED if a part of the list was refused.
        """
        ids = self._parts.pop(key, [])
        self._num_ids -= len(ids or ())
        if ids is None or self._flooded:
            raise ServiceError(
                pb.OVERLOADED,
                f"the long prompts being received at once have more than {self._max_ids} tokens in "
                "total; retry later",
            )
        return [*ids, *tail]

    def drop(self, key: str) -> None:
        """Forget the parts that were collected for `key`."""
        self._num_ids -= len(self._parts.pop(key, None) or ())
