"""`fetch` fills a volume with a model of the hub; `wait` returns when all of it is there.

The volume is the hub's own cache, which holds each file under its name only when it is whole. The
mark says that all of them are: it is made last, and named after the model with its commit. A branch
or a tag is refused: the mark of yesterday's files would let workers begin with half of today's.
"""

import os
import re
import sys
import time
from hashlib import sha256
from pathlib import Path

LOOK_S = 2.0
PINNED = re.compile(r"[^@]+@[0-9a-f]{40}(:.+)?")  # org/name@commit, or one file of it


def mark(model: str, cache: Path) -> Path:
    """The file that says that the model is complete."""
    return cache / f"{sha256(model.encode()).hexdigest()[:16]}.complete"


def fetch(model: str, cache: Path) -> None:
    """Returns once the model is there; at once if all of it is."""
    if not PINNED.fullmatch(model):
        sys.exit(f"{model!r} names no commit: write org/name@ and its 40 digits")
    if mark(model, cache).exists():
        print(f"{model} was in {cache} already", flush=True)
        return
    from pdserve.engine.checkpoints.resolve import resolve

    resolve(model, lambda what, share: None)
    mark(model, cache).write_text(f"{model}\n")
    print(f"{model} is in {cache}", flush=True)


def wait(model: str, cache: Path) -> None:
    """Returns once somebody else has fetched the model."""
    print(f"waiting for {model} in {cache}", flush=True)
    while not mark(model, cache).exists():
        time.sleep(LOOK_S)


if __name__ == "__main__":
    {"fetch": fetch, "wait": wait}[sys.argv[1]](
        os.environ["PDSERVE_MODEL"], Path(os.environ["HF_HUB_CACHE"])
    )
