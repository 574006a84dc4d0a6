"""Roles of a cluster's processes, the methods that each role may call, and a certificate for each
role.

A certificate holds its role as a DNS name, so a client can require the role of a server, and TLS
itself refuses a server of another role.
"""

import datetime
from enum import StrEnum
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650.0
RENEWED_LEFT = 1 / 3  # share of a certificate's lifetime that remains when it is replaced
EARLIER = datetime.timedelta(minutes=5)  # start of validity before now, for clocks that are behind
ROLE_DOMAIN = "pdserve.internal"


class Role(StrEnum):
    """The role of a process in its cluster."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def dns_name(self) -> str:
        """The DNS name that represents the role in a certificate; TLS verifies it like a host
        name."""
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


class Identity(NamedTuple):
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


def make_authority(days: float = AUTHORITY_DAYS) -> Identity:
    """Create a certificate authority, whose key signs the certificates of a cluster."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("pdserve cluster authority")
    builder = _builder(name, name, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return Identity(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def issue(authority: Identity, role: Role, days: float = 365) -> Identity:
    """Create a certificate for a role, signed by the authority and valid for `days`. Raises
    ValueError if the authority's certificate or key cannot be used."""
    signer = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError(
            "the certificate authority's key is not an elliptic-curve key, so it cannot sign"
        )
    issuer = x509.load_pem_x509_certificate(authority.certificate).subject
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(f"pdserve {role}"), issuer, key.public_key(), days)
    names = x509.SubjectAlternativeName([x509.DNSName(role.dns_name)])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for extension, critical in (
        (names, False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs=False), True),
        (x509.ExtendedKeyUsage(usages), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    return Identity(_pem(builder.sign(signer, hashes.SHA256())), _key_pem(key))


def role_in(certificate: bytes) -> Role:
    """Return the role that a PEM certificate names. Raises ValueError if it names none."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError(
            "the certificate names no role of a pdserve process (gateway, router, prefill, decode)"
        ) from None
    for name in names.get_values_for_type(x509.DNSName):
        for role in Role:
            if role.dns_name == name:
                return role
    raise ValueError(
        "the certificate names no role of a pdserve process (gateway, router, prefill, decode)"
    )


def expiries_of(pem: bytes) -> list[float]:
    """Return when each certificate in a PEM text expires, in Unix time. Raises ValueError if the
    text contains no certificate."""
    return [c.not_valid_after_utc.timestamp() for c in x509.load_pem_x509_certificates(pem)]


def check_pair(identity: Identity) -> None:
    """Raise ValueError if the key does not match the certificate, or if one of them cannot be
    read."""
    try:
        certified_key = x509.load_pem_x509_certificate(identity.certificate).public_key()
    except ValueError as error:
        raise ValueError(f"the certificate cannot be read: {error}") from None
    try:
        key = serialization.load_pem_private_key(identity.key, None).public_key()
    except (TypeError, ValueError) as error:  # TypeError: the key is encrypted
        raise ValueError(f"the certificate's key cannot be read: {error}") from None
    if key != certified_key:
        raise ValueError("the key does not match the certificate")


def needs_renewal(identity: Identity, role: Role, authority: Identity | None) -> bool:
    """Return whether a role's certificate has less than a third of its lifetime left or cannot be
    used: it names another role, does not match its key, or is not signed by the authority. Without
    an authority, the signature is not checked."""
    try:
        check_pair(identity)
        if role_in(identity.certificate) is not role:
            return True
        certificate = x509.load_pem_x509_certificate(identity.certificate)
        if authority is not None:
            signer = x509.load_pem_x509_certificate(authority.certificate)
            certificate.verify_directly_issued_by(signer)
    except (InvalidSignature, TypeError, ValueError):
        return True
    end = certificate.not_valid_after_utc
    left = end - datetime.datetime.now(datetime.UTC)
    return left < RENEWED_LEFT * (end - certificate.not_valid_before_utc)


def certificate_settings(authority: Identity, role: Role) -> dict[str, str]:
    """Create a certificate for a role; return it, its key and its authority as values of the
    certificate fields of ServerSettings. It is never renewed, so it is valid as long as its
    authority."""
    identity = issue(authority, role, AUTHORITY_DAYS)
    pem = {"cluster_ca": authority.certificate, "cluster_cert": identity.certificate}
    return {name: text.decode() for name, text in {**pem, "cluster_key": identity.key}.items()}


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
