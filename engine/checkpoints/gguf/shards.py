"""Names of the files of a split GGUF model."""

import re

from pdserve.engine.checkpoints.source import CheckpointError

SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MAX_SHARDS = 1000


def shard_names(name: str) -> list[str]:
    """Return all file names of the model that `name` belongs to, in order.

    Raises CheckpointError if the part numbers are invalid.
    """
    shard = SHARD.search(name)
    if shard is None:
        return [name]
    count = int(shard.group(2))
    if not 1 <= int(shard.group(1)) <= count <= MAX_SHARDS:
        raise CheckpointError(f"{name}: invalid part number")
    stem = name[: shard.start()]
    return [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
