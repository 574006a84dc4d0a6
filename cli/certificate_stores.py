"""Where `pdserve certs` stores certificates: a folder, or Secrets of a pod's namespace."""

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pdserve.cli.options import CommandError, OptionError
from pdserve.services.common.auth.certificates import Identity
from pdserve.services.common.kubernetes_api import ApiServer, ApiServerError

AUTHORITY = "ca"
KUBERNETES = "kubernetes:///"
PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
FORBIDDEN, NOT_FOUND = 403, 404


class CertificateStore(Protocol):
    """Identities by name: a role, or `ca` for the authority that signs them."""

    def read(self, name: str) -> Identity | None:
        """Return the identity with this name; None if there is none. Raises CommandError or
        OptionError if it cannot be read, which applies to `write` as well."""

    def write(self, name: str, identity: Identity, authority: bytes) -> None:
        """Store an identity, replacing the one with this name. `authority` is the certificate of
        its authority as PEM."""

    def describe(self, name: str) -> str:
        """Return the name of the file or the Secret that holds this identity's key."""


def certificate_store(target: str) -> CertificateStore:
    """Return the store that `pdserve certs` names: kubernetes:///PREFIX, or a folder. Raises
    OptionError if the target is malformed, or names Secrets outside a pod."""
    if not target.startswith("kubernetes:"):
        return CertificateFolder(Path(target))
    prefix = target.removeprefix(KUBERNETES)
    if not PREFIX.fullmatch(prefix):
        raise OptionError(
            f"{target!r} is not {KUBERNETES}PREFIX, where PREFIX begins the names of the Secrets"
        )
    try:
        return CertificateSecrets(ApiServer(), prefix)
    except (OSError, ValueError) as error:
        raise OptionError(f"{target}: {error}") from None


class CertificateFolder:
    """A folder of PEM files: NAME.pem and NAME-key.pem."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Identity | None:
        certificate = self._folder / f"{name}.pem"
        try:
            if not certificate.exists():
                return None
            return Identity(
                certificate.read_bytes(), (self._folder / f"{name}-key.pem").read_bytes()
            )
        except OSError as error:
            raise OptionError(f"{error.filename}: {error.strerror}") from None

    def write(self, name: str, identity: Identity, authority: bytes) -> None:
        """Each file is replaced as a whole, so that no process reads half of it. The key is written
        first, readable only by its owner."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for file, content, mode in (
                (f"{name}-key.pem", identity.key, 0o600),
                (f"{name}.pem", identity.certificate, 0o644),
            ):
                new = self._folder / f".{file}.new"
                new.unlink(missing_ok=True)
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                    out.write(content)
                new.replace(self._folder / file)
        except OSError as error:
            raise OptionError(f"{error.filename}: {error.strerror}") from None

    def describe(self, name: str) -> str:
        return str(self._folder / f"{name}-key.pem")


class CertificateSecrets:
    """Secrets PREFIX-NAME of type kubernetes.io/tls in the pod's namespace, with the keys that
    cert-manager uses: tls.crt, tls.key and ca.crt."""

    def __init__(self, api: ApiServer, prefix: str) -> None:
        """Raises OSError if the pod's namespace cannot be read."""
        self._api = api
        self._prefix = prefix
        self._path = f"/api/v1/namespaces/{api.namespace()}/secrets"

    def read(self, name: str) -> Identity | None:
        data = self._send("GET", name)
        if data is None:
            return None
        try:
            return Identity(b64decode(data["tls.crt"]), b64decode(data["tls.key"]))
        except KeyError as error:
            raise CommandError(f"Secret {self.describe(name)} has no {error.args[0]}") from None

    def write(self, name: str, identity: Identity, authority: bytes) -> None:
        content = {"tls.crt": identity.certificate, "tls.key": identity.key, "ca.crt": authority}
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.describe(name)},
            "type": "kubernetes.io/tls",
            "data": {key: b64encode(value).decode() for key, value in content.items()},
        }
        if self._send("PUT", name, secret) is None:
            self._send("POST", name, secret)

    def describe(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _send(
        self, method: str, name: str, secret: Mapping[str, object] | None = None
    ) -> dict[str, str] | None:
        """Return the data of the Secret after a request for it; None if there is no such Secret."""
        path = self._path if method == "POST" else f"{self._path}/{self.describe(name)}"
        try:
            found: dict[str, str] = self._api.send(method, path, secret).get("data") or {}
            return found
        except ApiServerError as error:
            if error.status == NOT_FOUND and method != "POST":
                return None
            rule = (
                "; the pod's service account needs a Role with the verbs get, update and create "
                "for the resource secrets"
                if error.status == FORBIDDEN
                else ""
            )
            what = f"cannot {method} Secret {self.describe(name)}: {error}{rule}"
            raise CommandError(what) from None
        except (OSError, ValueError) as error:
            raise CommandError(f"cannot reach the Kubernetes API server: {error}") from None
