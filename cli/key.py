"""`pdserve key NAME` creates an API key and its line for a key file."""

import secrets
import sys
from collections.abc import Mapping

from pdserve.cli.options import OptionError, Settings


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Print the line on standard output, and the key, which is not stored, on standard error."""
    from pdserve.services.common.tenants import hashed

    key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        line = hashed(positionals["name"], key)
    except ValueError as error:
        raise OptionError(str(error)) from None
    print(line)
    print(f"The key, which is not stored and cannot be shown again: {key}", file=sys.stderr)
    return 0
