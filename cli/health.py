"""`pdserve health ADDRESS`: a probe for containers, which then need no curl or grpcurl."""

import sys
from collections.abc import Mapping

from pdserve.cli.http_client import ApiClient, ApiError
from pdserve.cli.options import HealthSettings, OptionError, Settings


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Return 0 if the address serves; otherwise 1, with the reason on standard error."""
    address = positionals["address"]
    probe_settings = settings.build(HealthSettings)
    try:
        reason = (
            probe_http(address, probe_settings.timeout)
            if "://" in address
            else probe_grpc(address, probe_settings)
        )
    except (OSError, ValueError) as error:
        raise OptionError(str(error)) from None
    if reason:
        print(f"{address}: {reason}", file=sys.stderr)
    return 1 if reason else 0


def probe_http(url: str, timeout_s: float) -> str:
    """Why a GET of the URL does not return 2xx; empty if it does."""
    base, slash, path = url.partition("://")
    host, _, rest = path.partition("/")
    try:
        ApiClient(f"{base}{slash}{host}", timeout_s=timeout_s).get("/" + rest)
    except ApiError as error:
        return str(error)
    return ""


def probe_grpc(address: str, settings: HealthSettings) -> str:
    """Why the gRPC health service does not return SERVING; empty if it does.

    With certificates, the peer must have this process's role, since a container probes itself.
    Raises ValueError or OSError if the certificates cannot be used.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pdserve.services.common.rpc import CHANNEL_OPTIONS

    files = settings.cluster_ca, settings.cluster_cert, settings.cluster_key
    if any(files):
        from pdserve.services.common.auth.access import TlsAccess

        access = TlsAccess(*files)
        channel = access.open_blocking_channel(address, access.role())
    else:
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=settings.timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    serving = health_pb2.HealthCheckResponse.SERVING
    names = health_pb2.HealthCheckResponse.ServingStatus
    return "" if response.status == serving else names.Name(response.status)
