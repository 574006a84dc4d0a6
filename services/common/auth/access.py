"""Authenticates the processes of a cluster to each other, by a shared secret or by certificates.

The secret is sent in plain text, so it stays on one machine unless an option allows otherwise. With
certificates every internal connection is mutual TLS, and a certificate holds the role of its
process. Certificate files are read again for every connection, so that new ones take effect without
a restart.
"""

import hmac
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pdserve.protos import common_pb2
from pdserve.services.common.auth.certificates import RIGHTS, Identity, Role, check_pair, role_in
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.options import ServerSettings
from pdserve.services.common.rpc import AUTHORIZATION, CHANNEL_OPTIONS, Context, Guard, guarded

MIN_SECRET_BYTES = 32
Metadata = Iterable[tuple[str, str | bytes]]
log = logging.getLogger(__name__)
PEM = "-----BEGIN"
REPLACING_S = 0.05  # wait before gRPC frees files that a connection may be about to use


class TlsFiles:
    """A certificate and its key: paths of PEM files, or PEM text."""

    def __init__(self, certificate: str, key: str, authority: str = "") -> None:
        """`authority` signs the peers' certificates. Raises OSError if a file cannot be read,
        ValueError if the key does not match the certificate."""
        self._certificate, self._key, self._authority = certificate, key, authority
        key_pem, certificate_pem = self.pair()
        try:
            check_pair(Identity(certificate_pem, key_pem))
        except ValueError as error:
            raise ValueError(self._with_file_name(error)) from None
        self.authority()

    def _with_file_name(self, error: ValueError) -> str:
        """The error's text, prefixed with the certificate's file if it is one."""
        return f"{error}" if self._certificate.startswith(PEM) else f"{self._certificate}: {error}"

    def pair(self) -> tuple[bytes, bytes]:
        """(key, certificate), as gRPC takes them. Raises OSError if one cannot be read."""
        return read_pem(self._key), read_pem(self._certificate)

    def authority(self) -> bytes | None:
        """The authority's PEM; None if it is not set. Raises OSError if it cannot be read."""
        return read_pem(self._authority) if self._authority else None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of one port of a server. With an authority, clients must show a certificate
        too. Raises OSError if a file cannot be read.

        gRPC requests new files at each connection, one request at a time, and frees the old files
        if it gets new ones. Another thread's connection that made its request just before may still
        be about to use the old ones, and then the process crashes
        (https://github.com/grpc/grpc/issues/36693). So gRPC gets new files only if they differ, and
        after a pause in which that connection takes the old ones; other work of the calling thread
        waits meanwhile. A key that does not match the certificate is not used: the other of the two
        files is about to be replaced.
        """
        current = refused_files = self.pair(), self.authority()

        def new_files() -> grpc.ServerCertificateConfiguration | None:
            nonlocal current, refused_files
            if (self.pair(), self.authority()) in (current, refused_files):
                return None
            time.sleep(REPLACING_S)
            pair, authority = self.pair(), self.authority()
            try:
                check_pair(Identity(pair[1], pair[0]))
            except ValueError as error:
                log.warning(
                    "%s; the previous certificate stays in use", self._with_file_name(error)
                )
                refused_files = pair, authority
                if authority == current[1]:
                    return None
                pair = current[0]
            current = pair, authority
            return configuration(*current)

        return grpc.dynamic_ssl_server_credentials(
            configuration(*current),
            new_files,  # type: ignore[arg-type]  # gRPC takes None, too
            require_client_authentication=bool(self._authority),
        )


def configuration(
    pair: tuple[bytes, bytes], authority: bytes | None
) -> grpc.ServerCertificateConfiguration:
    """The certificate that a server shows, and the authority of its clients' certificates."""
    return grpc.ssl_server_certificate_configuration([pair], authority)


def read_pem(source: str) -> bytes:
    """The PEM of a path, or of PEM text itself. Raises OSError if the file cannot be read."""
    return source.encode() if source.startswith(PEM) else Path(source).read_bytes()


class TlsAccess:
    """Shows a certificate, and requires one of the same authority from each peer."""

    metadata: tuple[tuple[str, str], ...] = ()
    separates_clients = True  # callers from outside the cluster use a separate port

    def __init__(self, authority: str, certificate: str, key: str) -> None:
        """Each argument is the path of a PEM file, or PEM text. Raises ValueError if one is missing
        or the key does not match the certificate, OSError if one cannot be read."""
        if not (authority and certificate and key):
            raise ValueError("--cluster-ca, --cluster-cert and --cluster-key must be set together")
        self._files = TlsFiles(certificate, key, authority)

    def open_channel(self, address: str, to: Role) -> grpc.aio.Channel:
        """A channel to a process of role `to` at host:port; connects at the first call. Close it to
        free its socket. Raises OSError if a file cannot be read."""
        return grpc.aio.secure_channel(address, self._credentials(), options=_options(to))

    def open_blocking_channel(self, address: str, to: Role) -> grpc.Channel:
        """Like `open_channel`, for threads."""
        return grpc.secure_channel(address, self._credentials(), options=_options(to))

    def _credentials(self) -> grpc.ChannelCredentials:
        key, certificate = self._files.pair()
        return grpc.ssl_channel_credentials(self._files.authority(), key, certificate)

    def role(self) -> Role:
        """The role in this process's certificate. Raises OSError if it cannot be read, ValueError
        if it names no role."""
        return role_in(self._files.pair()[1])

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Add the cluster's port; return its number. Raises RuntimeError if it is taken."""
        return server.add_secure_port(bind, self._files.server_credentials())

    def interceptor(self, open_methods: Collection[str]) -> grpc.aio.ServerInterceptor:
        """An interceptor that refuses calls of roles without the right to a method, except to
        `open_methods`."""
        return RoleInterceptor(open_methods)

    def may_be(self, context: Context, role: Role) -> bool:
        """Whether the caller's certificate has this role."""
        return role in roles_of(context)


def _options(to: Role) -> list[tuple[str, Any]]:
    """Channel options that require the role's name in the peer's certificate, at any address."""
    return [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", to.dns_name)]


def roles_of(context: Context) -> set[Role]:
    """The roles in a caller's certificate; empty without one."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return {role for role in Role if role.dns_name.encode() in names}


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of roles without the right to a method, with PERMISSION_DENIED."""

    def __init__(self, open_methods: Collection[str]) -> None:
        self._open = frozenset(open_methods)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        handler = await continuation(handler_call_details)
        if handler is None or details.method in self._open:
            return handler
        allowed = RIGHTS.get(details.method, frozenset())
        return guarded(handler, _only_for(allowed, details.method))


def _only_for(allowed: frozenset[Role], method: str) -> Guard:
    """A guard that refuses callers of other roles."""

    @asynccontextmanager
    async def guard(request: Any, context: Context) -> AsyncIterator[Any]:
        roles = roles_of(context)
        if roles.isdisjoint(allowed):
            callers = " and ".join(sorted(roles)) or "a caller without a role"
            reason = f"{method} may not be called by {callers}"
            await abort(context, ServiceError(common_pb2.PERMISSION_DENIED, reason))
        yield request

    return guard


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


def make_access(settings: ServerSettings) -> Access:
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
