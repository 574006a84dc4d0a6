"""The folder of the unix sockets by which prefill and decode of one host share memory."""

import os
import stat
import tempfile
from pathlib import Path


def shm_folder(configured: str) -> str:
    """The configured folder, or one of this user's own under the temporary folder.

    Empty if that one belongs to somebody else or is open to others: shm is off then.
    """
    if configured:
        return configured
    folder = Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return ""
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return str(folder) if mine and not found.st_mode & 0o077 else ""


def host_id(folder: str) -> str:
    """Equal on processes that see the same folder of the same running kernel."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        Path(folder).mkdir(parents=True, exist_ok=True)
        where = os.stat(folder)
    except OSError:
        return ""
    return f"{kernel}/{where.st_dev:x}.{where.st_ino:x}" if folder else ""
