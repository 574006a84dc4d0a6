"""The SQLite file that `pdserve up` keeps for the next system with the same port on this host.

Its write-ahead log uses shared memory, so only one host may use the file, while several hosts may
share a home directory. A lock file beside it marks it as in use.
"""

import fcntl
import hashlib
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

MACHINE_ID = Path("/etc/machine-id")
MOUNTS = Path("/proc/self/mountinfo")
# File systems that other hosts may share, or whose locks may not work
SHARED = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "fuse")


@contextmanager
def kept_database(folder: Path, port: int) -> Iterator[Path]:
    """Yield the file, locked for the duration of the block. Raises OSError if it is not usable."""
    kind = _file_system(folder)
    if kind.partition(".")[0] in SHARED:  # fuse.sshfs
        raise OSError(f"{folder} is on a {kind} file system, which several hosts may share")
    path = folder / f"gateway-{_host()}-{port}.db"
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another `pdserve up` uses {path}") from None
        _check(path)
        yield path
    finally:
        os.close(lock)


def _host() -> str:
    """Return a name of this host: a hash, so that the machine id stays private."""
    name = ""
    with suppress(OSError):
        name = MACHINE_ID.read_text().strip()
    return hashlib.sha256(f"pdserve {name or socket.gethostname()}".encode()).hexdigest()[:12]


def _file_system(folder: Path) -> str:
    """Return the type of the folder's file system in the kernel's terms; "" if unknown."""
    kind, longest = "", -1
    real = folder.resolve()
    with suppress(OSError):
        for line in MOUNTS.read_text(errors="replace").splitlines():
            mount_fields, _, type_fields = line.partition(" - ")
            mount_point = re.sub(
                r"\\([0-7]{3})", lambda c: chr(int(c[1], 8)), mount_fields.split()[4]
            )
            if len(mount_point) >= longest and real.is_relative_to(mount_point):
                kind, longest = type_fields.split()[0], len(mount_point)
    return kind


def _check(path: Path) -> None:
    """Raise OSError if the file is not writable, for example because the disk is full."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=WAL").fetchall()
            connection.execute("CREATE TABLE IF NOT EXISTS last_start (at REAL)")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM last_start")
            connection.execute("INSERT INTO last_start VALUES (strftime('%s', 'now'))")
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error
