"""How processes reach each other: addresses, and channels whose calls carry the cluster secret."""

import ipaddress
import logging
import socket
from typing import Any

import grpc
import grpc.aio

log = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
MAX_MESSAGE_BYTES = 4 << 20
CONNECT_MS = 2_000  # a busy peer, or one far away, takes its time to say its HTTP/2 settings

# Options that both ends set: message limits, and pings that find a dead peer in 15 s.
LIMITS = [
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


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata that an internal call carries."""
    return ((AUTHORIZATION, f"Bearer {secret}"),)


class SecretChannel(grpc.aio.Channel):
    """A channel that adds the secret to each call's metadata.

    Client interceptors could do this too, but they put a queue and two tasks before each stream.
    """

    def __init__(self, inner: grpc.aio.Channel, secret: str) -> None:
        self._inner = inner
        self._metadata = bearer(secret)

    def _with_secret(self, call: Any) -> Any:
        def invoke(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return call(*args, metadata=(*self._metadata, *(metadata or ())), **kwargs)

        return invoke

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_secret(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_secret(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_secret(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_secret(self._inner.stream_stream(*args, **kwargs))

    async def __aenter__(self) -> "SecretChannel":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._inner.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()


def open_channel(address: str, secret: str) -> grpc.aio.Channel:
    """A channel to host:port; connects at the first call. Close it to free its socket."""
    return SecretChannel(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS), secret)


def resolve(name: str) -> list[str]:
    """The addresses that host:port stands for now; empty if it cannot be resolved."""
    host, _, port = name.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        log.debug("%s: %s", name, error)
        return []
    hosts = {str(address[4][0]) for address in found}
    return sorted(f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts)


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
