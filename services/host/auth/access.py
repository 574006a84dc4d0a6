"""Selects the credentials that the processes of a cluster show each other."""

from pdserve.services.host.auth.secret import SecretAccess
from pdserve.services.host.auth.tls import TlsAccess, TlsFiles
from pdserve.services.host.options import HostSettings

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
