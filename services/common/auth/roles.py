"""The roles of a cluster's processes, and which role may call what."""

from enum import StrEnum

ROLE_DOMAIN = "pdserve.internal"


class Role(StrEnum):
    """The role of a process in its cluster."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def dns_name(self) -> str:
        """The role's name in a certificate, with which TLS itself verifies the peer's role."""
        return f"{self}.{ROLE_DOMAIN}"


EVERY_ROLE = frozenset(Role)
# The roles that may call each internal method; a method that is not listed is closed to all of
# them. Methods for people (text, ids) and health checks are open: their servicers check an API key,
# or nothing.
RIGHTS: dict[str, frozenset[Role]] = {
    "/pdserve.v1.Fleet/Join": frozenset({Role.PREFILL, Role.DECODE}),
    "/pdserve.v1.Router/Session": frozenset({Role.GATEWAY}),
    "/pdserve.v1.Router/GetFleet": frozenset({Role.GATEWAY}),
    "/pdserve.v1.Router/Pick": frozenset({Role.GATEWAY}),
    "/pdserve.v1.Blobs/GetBlob": frozenset({Role.GATEWAY, Role.ROUTER}),
    "/pdserve.v1.Prefill/Session": frozenset({Role.ROUTER}),
    "/pdserve.v1.Decode/Session": frozenset({Role.ROUTER}),
    "/grpc.health.v1.Health/Watch": EVERY_ROLE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": EVERY_ROLE,
}
