"""Names of the files over which a GGUF model may be split."""

import re

from pdserve.engine.checkpoints.source import CheckpointError

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MAX_PARTS = 1000


def part_names(name: str) -> list[str]:
    """All parts of the model that `name` is a part of, in order, or `name` alone.

    Raises CheckpointError if their number makes no sense.
    """
    part = PART.search(name)
    if part is None:
        return [name]
    count = int(part.group(2))
    if not 1 <= int(part.group(1)) <= count <= MAX_PARTS:
        raise CheckpointError(f"{name}: no such part")
    stem = name[: part.start()]
    return [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
