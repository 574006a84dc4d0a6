"""Under which address others reach a process, and which addresses a name stands for."""

import ipaddress
import logging
import socket

log = logging.getLogger(__name__)


def resolve(name: str) -> list[str]:
    """The addresses that host:port stands for now; empty if it cannot be resolved."""
    host, _, port = name.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        log.debug("%s: %s", name, error)
        return []
    hosts = {str(address[4][0]) for address in found}
    return sorted(f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts)


def advertised(bound: str, advertise: str = "") -> str:
    """host:port for others. `advertise` may leave the port out, or give 0, for the bound one;
    empty with a wildcard bind means this machine's own address."""
    host, _, port = bound.rpartition(":")
    if advertise:
        wanted, colon, wanted_port = advertise.rpartition(":")
        if not colon or "]" in wanted_port:
            return f"{advertise}:{port}"
        return f"{wanted}:{wanted_port if wanted_port not in ('', '0') else port}"
    try:
        wildcard = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        wildcard = False
    return f"{_own_address()}:{port}" if wildcard else bound


def _own_address() -> str:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return name
    return str(found[0][4][0])
