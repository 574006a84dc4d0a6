"""Keeps foreign web pages away from a server that needs no key.

A browser sends requests for any page it shows. On a server that only this machine reaches, and that
needs no key, such a request must not pass as its user's: the names under which a browser knows the
server (Host) and the page (Origin) must be this machine's.
"""

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers

MAX_NAME = 253  # characters of a host name


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means this machine."""
    return len(host) <= MAX_NAME and _is_loopback(host)


@lru_cache(256)
def _is_loopback(host: str) -> bool:
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def foreign(headers: Headers, allowed_origins: Collection[str]) -> str:
    """Return why a request to a loopback server is not from this machine; empty if it is."""
    if not is_loopback(_host_of(f"//{headers.get('host', '')}")):
        return "this server accepts only requests to localhost; set an API key to allow others"
    origin = headers.get("origin")
    if origin is None or "*" in allowed_origins or origin in allowed_origins:
        return ""
    if is_loopback(_host_of(origin)):
        return ""
    return "web pages of other origins cannot call this server; allow them with --allow-origin"


def _host_of(url: str) -> str:
    """Return the host of a URL; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
