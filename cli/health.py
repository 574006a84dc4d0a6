"""`pdserve health ADDRESS` probes whether a server is healthy, so that containers need no curl or
grpcurl.
"""

import sys
from collections.abc import Mapping

from pdserve.cli.http_client import ApiClient, ApiError
from pdserve.cli.options import HealthSettings, OptionError, Settings


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve health`. Returns 0 if the server at the address is healthy; otherwise prints the
    reason on standard error and returns 1."""
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
    """Send a GET request to the URL; return why there is no 2xx response, or "" if there is one."""
    base, slash, path = url.partition("://")
    host, _, rest = path.partition("/")
    try:
        ApiClient(f"{base}{slash}{host}", timeout_s=timeout_s).get("/" + rest)
    except ApiError as error:
        return str(error)
    return ""


def probe_grpc(address: str, settings: HealthSettings) -> str:
    """Call the gRPC health service at the address; return why it does not report SERVING, or "" if
    it does.

    With certificates, the server must have the role in this process's certificate, since a
    container probes itself. Raises ValueError or OSError if the certificates cannot be used.
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
