"""Folders and files of `pdserve up`: a temporary folder for each run, a folder for data that
outlives the run, and a database file for each port.

Each process locks the folder of its run, which shows that it is alive; the next process removes the
folders of processes that were killed.

The database's write-ahead log uses shared memory, so only one host may use the file, while several
hosts may share a home directory. A lock file beside the database marks it as in use.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

PREFIX = "pdserve-up-"
CONFIG_FILE = "config.yaml"  # the options in force, without secrets
STATE_FILE = "state.json"  # what runs, for `pdserve ps`
MACHINE_ID = Path("/etc/machine-id")
MOUNTS = Path("/proc/self/mountinfo")
# File systems that other hosts may share, or whose locks may not work
SHARED = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "fuse")


@contextmanager
def run_dir(parent: Path | None = None) -> Iterator[Path]:
    """Create a private temporary folder for this run, and remove it at the end of the block. Also
    removes folders whose processes were killed."""
    base = parent or Path(tempfile.gettempdir())
    sweep(base)
    path, lock = _locked_folder(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def run_dirs(base: Path | None = None) -> list[Path]:
    """Return the folders of this user's runs, including those of processes that were killed."""
    paths = []
    for path in sorted((base or Path(tempfile.gettempdir())).glob(PREFIX + "*")):
        with suppress(FileNotFoundError):  # the owner has just ended
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                paths.append(path)
    return paths


def is_running(path: Path) -> bool:
    """Return whether the process of a run folder is alive, that is, whether it locks the folder."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _locked_folder(base: Path) -> tuple[Path, int]:
    """Create a folder for a run and lock it; return its path and the lock's file descriptor.
    Retries if another process removes the folder before it is locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def sweep(base: Path) -> None:
    """Remove this user's run folders whose processes have ended, that is, which are not locked."""
    for path in base.glob(PREFIX + "*"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def data_dir() -> Path:
    """Return the user's folder for pdserve's data ("pdserve" in the XDG data directory), and create
    it if needed. Raises OSError if it cannot be created, is not writable or belongs to another
    user."""
    base = os.environ.get("XDG_DATA_HOME", "")
    folder = Path(base) if base.startswith("/") else Path.home() / ".local/share"
    folder /= "pdserve"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")
    return folder


@contextmanager
def kept_database(folder: Path, port: int) -> Iterator[Path]:
    """Yield the path of the gateway's database file for this host and port, which is locked during
    the block. Raises OSError if the file cannot be used or another `pdserve up` uses it."""
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
    """Return a name for this host: a hash, since the machine id must stay private."""
    name = ""
    with suppress(OSError):
        name = MACHINE_ID.read_text().strip()
    return hashlib.sha256(f"pdserve {name or socket.gethostname()}".encode()).hexdigest()[:12]


def _file_system(folder: Path) -> str:
    """Return the kernel's name for the type of file system that contains the folder, e.g. "nfs4";
    "" if it is unknown."""
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
    """Raise OSError if the database file cannot be written, for example because the disk is
    full."""
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
