"""How processes reach each other: options of connections, their ends, and addresses."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

AUTHORIZATION = "authorization"
MAX_MESSAGE_BYTES = 4 << 20
CONNECT_MS = 2_000  # a busy peer, or one far away, takes its time to say its HTTP/2 settings

# Options that both ends set: message limits, and pings that find a dead peer in 15 s; none that
# measure the bandwidth, of which there would be one for each small message of an idle connection.
# So a stream has 64 KiB on its way at most: what is large, KV, has connections of its own.
LIMITS = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *LIMITS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # what one attempt may take, not a pause
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, closed with the channel
]


@contextmanager
def may_be_closed() -> Iterator[None]:
    """For calls on a channel that another task closes when its peer is lost. Raises ConnectionError
    then: gRPC would cancel whoever waits for an answer, as if that had given up."""
    try:
        yield
    except grpc.aio.UsageError as error:  # it was closed before the call
        raise ConnectionError("the channel is closed") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionError("the channel was closed") from None


def advertised(bound: str, advertise: str = "") -> str:
    """host:port for others. `advertise` may leave the port out, or give 0, for the bound one;
    empty with a wildcard bind means this machine's own address."""
    host, _, port = bound.rpartition(":")
    if advertise:
        wanted, colon, wanted_port = advertise.rpartition(":")
        if not colon or "]" in wanted_port:
            return f"{advertise}:{port}"
        return f"{wanted}:{wanted_port if wanted_port not in ('', '0') else port}"
    try:
        wildcard = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        wildcard = False
    return f"{_own_address()}:{port}" if wildcard else bound


def _own_address() -> str:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return name
    return str(found[0][4][0])
