"""`pdserve certs TARGET` creates the certificates of a cluster; `pdserve key NAME` creates an API
key and its line for a key file.
"""

import secrets
import sys
from collections.abc import Mapping

from pdserve.cli.options import CertsSettings, CommandError, OptionError, Settings


def certs(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve certs`: create a certificate for every role, signed by the target's authority,
    which is created first if the target has none. Returns the exit code."""
    from pdserve.cli.certificate_stores import AUTHORITY, certificate_store
    from pdserve.services.common.auth.certificates import (
        Role,
        issue,
        make_authority,
        needs_renewal,
    )

    options = settings.build(CertsSettings)
    target = positionals["target"]
    store = certificate_store(target)
    authority = store.read(AUTHORITY)
    existing = {role: store.read(role) for role in Role} if options.keep_existing else {}
    kept = [
        role
        for role, identity in existing.items()
        if identity is not None and not needs_renewal(identity, role, authority)
    ]
    if len(kept) == len(Role):
        print(f"{target} has valid certificates for all roles already.", file=sys.stderr)
        return 0
    if authority is None:
        if any(existing.values()):
            raise CommandError(
                f"{store.describe(AUTHORITY)} is missing, so no certificate can be added or "
                "renewed; without --keep-existing, all are replaced"
            )
        authority = make_authority()
        store.write(AUTHORITY, authority, authority.certificate)
    made = [role for role in Role if role not in kept]
    for role in made:
        try:
            identity = issue(authority, role, options.days)
        except ValueError as error:
            raise OptionError(f"{store.describe(AUTHORITY)}: {error}") from None
        store.write(role, identity, authority.certificate)
    print(
        f"{target} now has an authority, and new certificates and keys of {', '.join(made)}.\n"
        "Start each process with --cluster-ca and with the --cluster-cert and --cluster-key of its "
        f"role. No process needs the authority's key in {store.describe(AUTHORITY)}; keep it "
        "secret.",
        file=sys.stderr,
    )
    return 0


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
