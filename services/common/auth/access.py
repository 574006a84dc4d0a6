"""Authentication between the processes of a cluster, by a shared secret or by certificates.

The secret is sent in plain text, so it stays on one machine unless --trust-network allows
otherwise. With certificates every connection between processes is mutual TLS, and the certificate
of a process names its role. Certificate files are read again for every connection, so that new
files take effect without a restart.
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
    """A certificate, its private key and, optionally, the authority that must have signed the
    peers' certificates. Each is the path of a PEM file, or PEM text."""

    def __init__(self, certificate: str, key: str, authority: str = "") -> None:
        """Read and check the files. `authority` must have signed the peers' certificates; empty:
        peers need none. Raises OSError if a file cannot be read, ValueError if the key does not
        match the certificate."""
        self._certificate, self._key, self._authority = certificate, key, authority
        key_pem, certificate_pem = self.pair()
        try:
            check_pair(Identity(certificate_pem, key_pem))
        except ValueError as error:
            raise ValueError(self._with_file_name(error)) from None
        self.authority()

    def _with_file_name(self, error: ValueError) -> str:
        """Return the error's text, prefixed with the path of the certificate file, if the
        certificate was configured as a path."""
        return f"{error}" if self._certificate.startswith(PEM) else f"{self._certificate}: {error}"

    def pair(self) -> tuple[bytes, bytes]:
        """Read the key and the certificate; return them in this order, as PEM, as gRPC takes them.
        Raises OSError if one cannot be read."""
        return read_pem(self._key), read_pem(self._certificate)

    def authority(self) -> bytes | None:
        """Read the certificate authority; return it as PEM, or None if it is not configured. Raises
        OSError if it cannot be read."""
        return read_pem(self._authority) if self._authority else None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Make a server's credentials for one port, which follow changes of the files. If an
        authority is configured, clients must show a certificate too. Raises OSError if a file
        cannot be read.

        gRPC asks for changed files at each new connection, for one connection at a time, and frees
        the old files if it receives new ones. A connection of another thread that did so just
        before may still be about to use the old files, and then the process crashes
        (https://github.com/grpc/grpc/issues/36693). So gRPC receives files only if they differ from
        the current ones, and after a pause in which that other connection takes the old files; the
        calling thread does no other work during the pause. A key that does not match its
        certificate is not used: one of the two files has been replaced, and the other is about to
        be.
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
    """Make gRPC's TLS configuration of a server from its (key, certificate) and from the authority
    that must have signed its clients' certificates."""
    return grpc.ssl_server_certificate_configuration([pair], authority)


def read_pem(source: str) -> bytes:
    """Return the content of a PEM file; if `source` is PEM text instead of a path, return that
    text. Raises OSError if the file cannot be read."""
    return source.encode() if source.startswith(PEM) else Path(source).read_bytes()


class TlsAccess:
    """Access by certificates: shows this process's certificate to each peer, and requires that the
    peer shows one that the same authority has signed."""

    metadata: tuple[tuple[str, str], ...] = ()
    separates_clients = True  # callers from outside the cluster use a separate port

    def __init__(self, authority: str, certificate: str, key: str) -> None:
        """Each argument is the path of a PEM file, or PEM text. Raises ValueError if an argument is
        empty or the key does not match the certificate, OSError if a file cannot be read."""
        if not (authority and certificate and key):
            raise ValueError("--cluster-ca, --cluster-cert and --cluster-key must be set together")
        self._files = TlsFiles(certificate, key, authority)

    def open_channel(self, address: str, to: Role) -> grpc.aio.Channel:
        """Open a gRPC channel to the process of role `to` at `address` (host:port); it connects at
        the first call. The caller must close it. Raises OSError if a certificate file cannot be
        read."""
        return grpc.aio.secure_channel(address, self._credentials(), options=_options(to))

    def open_blocking_channel(self, address: str, to: Role) -> grpc.Channel:
        """Like `open_channel`, but returns a blocking channel for use on threads."""
        return grpc.secure_channel(address, self._credentials(), options=_options(to))

    def _credentials(self) -> grpc.ChannelCredentials:
        key, certificate = self._files.pair()
        return grpc.ssl_channel_credentials(self._files.authority(), key, certificate)

    def role(self) -> Role:
        """Return the role in this process's certificate. Raises OSError if the certificate cannot
        be read, ValueError if it names no role."""
        return role_in(self._files.pair()[1])

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Add a port to the server for calls between the cluster's processes; return its number.
        Raises RuntimeError if the port is taken."""
        return server.add_secure_port(bind, self._files.server_credentials())

    def interceptor(self, open_methods: Collection[str]) -> grpc.aio.ServerInterceptor:
        """Make a server interceptor that refuses a call if the caller's role may not call its
        method; methods in `open_methods` are not checked."""
        return RoleInterceptor(open_methods)

    def may_be(self, context: Context, role: Role) -> bool:
        """Return whether the caller's certificate names this role."""
        return role in roles_of(context)


def _options(to: Role) -> list[tuple[str, Any]]:
    """Return channel options that require that the peer's certificate names the role `to`, whatever
    the peer's address is."""
    return [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", to.dns_name)]


def roles_of(context: Context) -> set[Role]:
    """Return the roles that the certificate of a call's sender names; empty if it sent no
    certificate."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return {role for role in Role if role.dns_name.encode() in names}


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """A server interceptor that refuses a call with PERMISSION_DENIED if the caller's role may not
    call its method."""

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
    """Make a guard that refuses calls of `method` by processes whose role is not in `allowed`."""

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
    """Access by shared secrets: sends the first of the configured secrets and accepts any of them,
    so that a secret can be replaced without an outage."""

    separates_clients = False  # callers from outside the cluster use the same port

    def __init__(self, secrets: Sequence[str], trust_network: bool = False) -> None:
        """With `trust_network`, secrets may be sent to other machines. Raises ValueError if there
        is no secret, or if one is so short that it could be guessed."""
        if not secrets:
            raise ValueError("no cluster secret is set: set --cluster-secret")
        if any(len(secret.encode()) < MIN_SECRET_BYTES for secret in secrets):
            raise ValueError(
                f"--cluster-secret must have at least {MIN_SECRET_BYTES} bytes: a shorter secret "
                "could be guessed"
            )
        self._secrets = tuple(secrets)
        self._trust_network = trust_network
        self.metadata = ((AUTHORIZATION, f"Bearer {secrets[0]}"),)

    def open_channel(self, address: str, to: Role) -> grpc.aio.Channel:
        """Open a gRPC channel to `address` (host:port); it connects at the first call. The caller
        must close it. Raises PermissionError if the address is on another machine and
        `trust_network` is off."""
        self._check(address)
        inner = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return SecretChannel(inner, self.metadata)

    def open_blocking_channel(self, address: str, to: Role) -> grpc.Channel:
        """Like `open_channel`, but returns a blocking channel for use on threads. The channel does
        not send the secret: the caller must pass `metadata` with each call."""
        self._check(address)
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Add a port to the server for calls between the cluster's processes; return its number.
        Raises RuntimeError if the port is taken, PermissionError if other machines can reach it and
        `trust_network` is off."""
        self._check(bind)
        return server.add_insecure_port(bind)

    def interceptor(self, open_methods: Collection[str]) -> grpc.aio.ServerInterceptor:
        """Make a server interceptor that refuses calls without a valid secret; methods in
        `open_methods` are not checked."""
        return SecretInterceptor(self, open_methods)

    def has_secret(self, metadata: Metadata) -> bool:
        """Return whether the metadata of a call contains one of the secrets. The time that the
        comparison takes does not depend on the secrets' content."""
        header = b""
        for key, value in metadata:
            if key == AUTHORIZATION:
                header = value if isinstance(value, bytes) else value.encode()
        matches = [hmac.compare_digest(header, f"Bearer {s}".encode()) for s in self._secrets]
        return any(matches)

    def may_be(self, context: Context, role: Role) -> bool:
        """Return whether the caller may act in this role: true for each role if it sent a valid
        secret."""
        return self.has_secret(context.invocation_metadata() or ())

    def _check(self, address: str) -> None:
        if not (self._trust_network or is_loopback(address)):
            raise PermissionError(
                f"{address} is not on this machine, so the cluster secret would be sent in plain "
                "text: use certificates (`pdserve certs` creates them), or set --trust-network"
            )


def is_loopback(address: str) -> bool:
    """Return whether an address is certainly on this machine. `localhost` is the only host name for
    which this holds, because any other name may resolve to another machine next time."""
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
    """A server interceptor that refuses a call without a valid secret with UNAUTHENTICATED, before
    its request is read."""

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
    """A gRPC channel that adds the cluster secret to the metadata of each call.

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
    """Make the access that the options select: by certificates if a certificate option is set,
    otherwise by the shared secret.

    Raises ValueError if neither is configured, if a secret could be guessed, if one of the three
    certificate options is missing or if the key does not match the certificate; OSError if a file
    cannot be read.
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
    """Make the TlsFiles of the certificate that a server shows its clients; None if no certificate
    and no key is set. Raises ValueError if only one of them is set or they do not match, OSError if
    a file cannot be read."""
    if bool(certificate) != bool(key):
        raise ValueError("--tls-cert and --tls-key must be set together")
    return TlsFiles(certificate, key) if certificate else None
