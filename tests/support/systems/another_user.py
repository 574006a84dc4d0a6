"""The rights of another user's process: a child that drops root's rights, then tries."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NOBODY = 65534
# The child drops them by itself, since the interpreter may be unreachable for that user.
CHILD = f"""
import json, os, socket, stat, sys

os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})


def tried(path):
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISSOCK(mode):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
        elif stat.S_ISDIR(mode):
            os.listdir(path)
        else:
            open(path, "rb").close()
    except OSError as error:
        return type(error).__name__
    return "reached"


json.dump({{path: tried(path) for path in json.load(sys.stdin)}}, sys.stdout)
"""


def tried_by_another_user(paths: Iterable[Path]) -> dict[Path, str]:
    """Connect to sockets, read files and list folders; return "reached" or the error's name for
    each. Requires root, to become another user.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", CHILD],
        input=json.dumps([str(path) for path in paths]),
        capture_output=True,
        text=True,
        check=True,
    )
    return {Path(path): outcome for path, outcome in json.loads(done.stdout).items()}
