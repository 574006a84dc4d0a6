"""`pdserve certs FOLDER` creates the certificates of a cluster as files; `pdserve key NAME` creates
an API key and its line for a key file.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from pdserve.cli.options import CertsSettings, OptionError, Settings


def certs(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve certs`: create a new certificate for every role, signed by the folder's
    authority, which is created first if the folder has none. Returns the exit code."""
    from pdserve.services.common.auth.certificates import Identity, Role, issue, make_authority

    days = settings.build(CertsSettings).days
    folder = Path(positionals["folder"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "ca.pem").exists():
            authority = Identity(
                (folder / "ca.pem").read_bytes(), (folder / "ca-key.pem").read_bytes()
            )
        else:
            authority = make_authority()
            _write(folder, "ca", authority.certificate, authority.key)
        for role in Role:
            _write(folder, role, *issue(authority, role, days))
    except OSError as error:
        raise OptionError(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{folder / 'ca-key.pem'}: {error}") from None
    print(
        f"{folder} now has ca.pem, and a certificate and a key for each of {', '.join(Role)}.\n"
        "Start each process with --cluster-ca and with the --cluster-cert and --cluster-key of its "
        "role. Keep ca-key.pem secret: no process needs it.",
        file=sys.stderr,
    )
    return 0


def _write(folder: Path, name: str, certificate: bytes, key: bytes) -> None:
    """Write a certificate and its key as files. Each file is replaced as a whole, so that no
    process reads half of it. The key is written first, readable only by its owner."""
    for file, content, mode in (
        (f"{name}-key.pem", key, 0o600),
        (f"{name}.pem", certificate, 0o644),
    ):
        new = folder / f".{file}.new"
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
            out.write(content)
        new.replace(folder / file)


def key(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve key`: create an API key. Prints its line for a key file (name and hash) on
    standard output, and the key itself, which is not stored, on standard error. Returns the exit
    code."""
    from pdserve.services.common.tenants import hashed

    new_key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        line = hashed(positionals["name"], new_key)
    except ValueError as error:
        raise OptionError(str(error)) from None
    print(line)
    print(f"The key, which is not stored and cannot be shown again: {new_key}", file=sys.stderr)
    return 0
