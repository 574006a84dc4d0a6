"""Where `pdserve up` keeps what outlives it: a folder of its user, which nobody else may read."""

import os
from pathlib import Path


def data_dir() -> Path:
    """As the XDG base directory specification has it. Raises OSError if it cannot be made."""
    base = os.environ.get("XDG_DATA_HOME", "")
    folder = Path(base) if base.startswith("/") else Path.home() / ".local/share"
    folder /= "pdserve"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")
    return folder
