"""Connections between processes: options, closing, and addresses."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

AUTHORIZATION = "authorization"
MAX_MESSAGE_BYTES = 4 << 20
CONNECT_MS = 2_000  # a busy or distant peer takes its time to send its HTTP/2 settings

# Options that both ends set: message limits, and pings that detect a dead peer in 15 s. Bandwidth
# probes are off, since each small message on an idle connection would cause one; so a stream has at
# most 64 KiB in flight, and KV, which is large, uses separate connections.
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
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # time limit of one attempt, not a pause
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel, closed with it
]


@contextmanager
def may_be_closed() -> Iterator[None]:
    """A context for calls on a channel that another task closes when its peer is lost. Raises
    ConnectionError then; gRPC itself would raise CancelledError in the waiting task."""
    try:
        yield
    except grpc.aio.UsageError as error:  # closed before the call
        raise ConnectionError("the channel is closed") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionError("the channel was closed") from None


def advertised(bound: str, advertise: str = "") -> str:
    """host:port for other processes. `advertise` may omit the port, or give 0, for the bound one;
    if it is empty and the bind is a wildcard, the host is this machine's address."""
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
