"""The folder for data that outlives `pdserve up`; only its user may read it."""

import os
import stat
from pathlib import Path


def data_dir() -> Path:
    """Return the folder (XDG base directory specification); create it if needed. Raises OSError if
    it cannot be created, is not writable, or belongs to another user."""
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
