"""Single processes of pdserve, as in containers, with certificates or a secret."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from pdserve.services.host.auth.access import Access, make_access
from pdserve.services.host.options import HostSettings

SECRET = "the secret of the cluster, in plain text"
PDSERVE = (sys.executable, "-P", "-m", "pdserve.services.cli.main")


def make_certificates(folder: Path) -> None:
    """Run `pdserve certs`: a CA and a certificate for each role."""
    subprocess.run([*PDSERVE, "certs", str(folder)], check=True, capture_output=True)


def files(role: str, certificates: Path) -> tuple[Path, Path, Path]:
    """The CA, a role's certificate and its key."""
    return (
        certificates / "ca.pem",
        certificates / f"{role}.pem",
        certificates / f"{role}-key.pem",
    )


def trust(role: str, certificates: Path | None) -> list[str]:
    """The options by which a process is known to the others."""
    if certificates is None:
        return ["--cluster-secret", SECRET, "--trust-network"]  # several hosts on this machine
    ca, own, key = files(role, certificates)
    return ["--cluster-ca", f"{ca}", "--cluster-cert", f"{own}", "--cluster-key", f"{key}"]


def access_of(role: str, certificates: Path | None) -> Access:
    """The same credentials for this process, which then calls as a process of that role."""
    if certificates is None:
        return make_access(HostSettings(cluster_secret=(SECRET,), trust_network=True))
    ca, own, key = map(str, files(role, certificates))
    return make_access(HostSettings(cluster_ca=ca, cluster_cert=own, cluster_key=key))


def start(
    stack: ExitStack,
    role: str,
    *words: str,
    within: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ends with the stack; `within` precedes its command, and `env` is added
    to its environment."""
    process = subprocess.Popen(
        [*within, *PDSERVE, role, *words],
        env=os.environ | {"PDSERVE_DRAIN_S": "1"} | dict(env or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process
