"""Selects the credentials that the processes of a cluster show each other, and checks a shared
secret.

The secret is sent in plain text. It stays on one machine, where others cannot read the traffic,
unless an option allows otherwise; auth/tls.py is for several machines.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from pdserve.protos import common_pb2
from pdserve.services.common.auth.roles import Role
from pdserve.services.common.auth.tls import TlsAccess, TlsFiles
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.options import HostSettings
from pdserve.services.common.rpc import AUTHORIZATION, CHANNEL_OPTIONS

MIN_SECRET_BYTES = 32
Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]


class SecretAccess:
    """Shows the first of several secrets and accepts all, so that one can be replaced without an
    outage."""

    separates_clients = False  # callers from outside the cluster use the same port

    def __init__(self, secrets: Sequence[str], trust_network: bool = False) -> None:
        """With `trust_network`, secrets may leave this machine. Raises ValueError if there is no
        secret or one could be guessed."""
        if not secrets:
            raise ValueError("no cluster secret is set")
        if any(len(secret.encode()) < MIN_SECRET_BYTES for secret in secrets):
            raise ValueError(f"--cluster-secret needs at least {MIN_SECRET_BYTES} bytes")
        self._secrets = tuple(secrets)
        self._trust_network = trust_network
        self.metadata = ((AUTHORIZATION, f"Bearer {secrets[0]}"),)

    def open_channel(self, address: str, to: Role) -> grpc.aio.Channel:
        """A channel to host:port; connects at the first call. Close it to free its socket. Raises
        PermissionError if the address is not on this machine."""
        self._check(address)
        inner = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return SecretChannel(inner, self.metadata)

    def open_blocking_channel(self, address: str, to: Role) -> grpc.Channel:
        """Like `open_channel`, for threads; the caller adds `metadata` to each call."""
        self._check(address)
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Add the cluster's port; return its number. Raises RuntimeError if it is taken,
        PermissionError if other machines can reach it."""
        self._check(bind)
        return server.add_insecure_port(bind)

    def interceptor(self, open_methods: Collection[str]) -> grpc.aio.ServerInterceptor:
        """An interceptor that refuses calls without the secret, except to `open_methods`."""
        return SecretInterceptor(self, open_methods)

    def has_secret(self, metadata: Metadata) -> bool:
        """Whether call metadata carries one of the secrets; compares all in constant time."""
        header = b""
        for key, value in metadata:
            if key == AUTHORIZATION:
                header = value if isinstance(value, bytes) else value.encode()
        matches = [hmac.compare_digest(header, f"Bearer {s}".encode()) for s in self._secrets]
        return any(matches)

    def may_be(self, context: Context, role: Role) -> bool:
        """Whether the caller may have this role; one secret serves all roles."""
        return self.has_secret(context.invocation_metadata() or ())

    def _check(self, address: str) -> None:
        if not (self._trust_network or is_loopback(address)):
            raise PermissionError(
                f"{address} is not on this machine, so the cluster secret would be sent in plain "
                "text: use certificates (`pdserve certs` creates them), or set --trust-network"
            )


def is_loopback(address: str) -> bool:
    """Whether an address can only be on this machine. `localhost` is the only name that counts: any
    other may resolve to another machine next time."""
    host = address.rpartition(":")[0]
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def _deny(_: Any, context: Context) -> None:
    error = ServiceError(common_pb2.UNAUTHENTICATED, "missing or wrong cluster secret")
    await abort(context, error)


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call with UNAUTHENTICATED before a byte of the request is read."""

    def __init__(self, access: SecretAccess, open_methods: Collection[str]) -> None:
        self._access = access
        self._open = frozenset(open_methods)
        # A streaming handler, since a unary one would first wait for the peer's message.
        self._denial: Any = grpc.stream_stream_rpc_method_handler(_deny)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        if details.method in self._open or self._access.has_secret(
            details.invocation_metadata or ()
        ):
            return await continuation(handler_call_details)
        return self._denial


class SecretChannel(grpc.aio.Channel):
    """A channel that adds the secret to each call's metadata.

    Client interceptors could do this too, but they put a queue and two tasks before each stream.
    """

    def __init__(self, inner: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._inner = inner
        self._metadata = tuple(metadata)

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


Access = SecretAccess | TlsAccess


def make_access(settings: HostSettings) -> Access:
    """Certificates if any are set, otherwise the shared secret.

    Raises ValueError if neither is set, if a secret could be guessed, if a certificate option is
    missing or if the key does not match the certificate; OSError if a file cannot be read.
    """
    files = settings.cluster_ca, settings.cluster_cert, settings.cluster_key
    if any(files):
        return TlsAccess(*files)
    if not settings.cluster_secret:
        raise ValueError(
            "--cluster-secret is required (or set PDSERVE_CLUSTER_SECRET), or certificates: "
            "--cluster-ca, --cluster-cert and --cluster-key"
        )
    return SecretAccess(settings.cluster_secret, settings.trust_network)


def make_tls(certificate: str, key: str) -> TlsFiles | None:
    """The certificate that clients see; None if none is set. Raises ValueError if only one of the
    two is set or they do not match, OSError if one cannot be read."""
    if bool(certificate) != bool(key):
        raise ValueError("--tls-cert and --tls-key must be set together")
    return TlsFiles(certificate, key) if certificate else None
