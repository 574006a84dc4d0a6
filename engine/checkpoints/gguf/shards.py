"""Names of the files over which a GGUF model may be split."""

import re

from pdserve.engine.checkpoints.source import CheckpointError

SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MAX_SHARDS = 1000


def shard_names(name: str) -> list[str]:
    """All files of the model that `name` is one of, in order, or `name` alone.

    Raises CheckpointError if their number makes no sense.
    """
    shard = SHARD.search(name)
    if shard is None:
        return [name]
    count = int(shard.group(2))
    if not 1 <= int(shard.group(1)) <= count <= MAX_SHARDS:
        raise CheckpointError(f"{name}: no such part")
    stem = name[: shard.start()]
    return [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
