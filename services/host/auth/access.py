"""What the processes of a cluster show each other before they are trusted."""

from pdserve.services.host.auth.secret import SecretAccess
from pdserve.services.host.auth.tls import TlsAccess, TlsFiles
from pdserve.services.host.options import HostSettings

Access = SecretAccess | TlsAccess


def make_access(settings: HostSettings) -> Access:
    """Certificates if there are any, the shared secret otherwise.

    Raises ValueError if there is neither, for a secret that could be guessed and for certificates
    that lack a part or have another's key; OSError for a file that cannot be read.
    """
    files = settings.cluster_ca, settings.cluster_cert, settings.cluster_key
    if any(files):
        return TlsAccess(*files)
    if not settings.cluster_secret:
        raise ValueError(
            "--cluster-secret is needed (or PDSERVE_CLUSTER_SECRET), or certificates: "
            "--cluster-ca, --cluster-cert and --cluster-key"
        )
    return SecretAccess(settings.cluster_secret, settings.trust_network)


def make_tls(certificate: str, key: str) -> TlsFiles | None:
    """What clients see; None without a certificate. Raises ValueError if one of the two is missing
    or they do not match, OSError if one cannot be read."""
    if bool(certificate) != bool(key):
        raise ValueError("--tls-cert and --tls-key belong together")
    return TlsFiles(certificate, key) if certificate else None
