"""A separate PostgreSQL server for a test, where Debian's package is installed."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from systems.eventually import wait_until

INSTALLED = Path("/usr/lib/postgresql")


def programs() -> Path | None:
    """Return the folder of its programs; None if a required file is missing."""
    found = sorted(INSTALLED.glob("*/bin/postgres"))
    return found[-1].parent if found and find_spec("asyncpg") else None


@contextmanager
def postgres(bin_dir: Path) -> Iterator[str]:
    """Yield the URL of a new database. The server refuses to run as root, so root runs it as its
    own user.
    """
    as_root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="pdserve-pg-"))
    user = "postgres" if as_root else None
    try:
        if as_root:
            owner = pwd.getpwnam("postgres")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        subprocess.run(
            [bin_dir / "initdb", "-D", folder / "data", "-U", "pdserve", "-A", "trust", "-N"],
            check=True, capture_output=True, user=user, cwd=folder,
        )  # fmt: skip
        options = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
        server = subprocess.Popen(
            [bin_dir / "postgres", "-D", folder / "data", "-p", str(port), "-F", *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd=folder,
        )  # fmt: skip
        try:
            ready = [bin_dir / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
            wait_until(lambda: subprocess.run(ready).returncode == 0, "PostgreSQL")
            yield f"postgresql://pdserve@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
