"""A module after whose import the system refuses the first fork."""

import os

fork = os.fork


def refuse() -> int:
    os.fork = fork
    raise BlockingIOError("no more processes")


os.fork = refuse
