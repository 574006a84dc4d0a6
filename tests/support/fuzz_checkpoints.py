"""Reads mutated model files under a memory limit; a process of its own, since it may die.

`python fuzz_checkpoints.py KIND FILE EXAMPLES FOLDER` prints a JSON object of outcomes. Anything
but success or CheckpointError ends it with a traceback; a huge allocation does so by MemoryError.
"""

import json
import logging
import resource
import sys
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdserve.engine.architectures import parse_config
from pdserve.engine.checkpoints.source import CheckpointError
from pdserve.engine.load import open_checkpoint
from pdserve.engine.models.config import UnsupportedModel
from pdserve.engine.weights.plain import empty
from pdserve.engine.weights.unpack import unpack_into

ROOM_BYTES = 256 << 20

# Lengths and counts that have broken parsers: signs, wraps of 32 and 64 bits, off by one.
EDGES = [0, 1, 2, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**60]
EDGES += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
numbers = st.sampled_from(EDGES).flatmap(
    lambda n: st.sampled_from([n.to_bytes(8, "little"), (n % 2**32).to_bytes(4, "little")])
)
letters = st.text("abcxyz_.019", min_size=1, max_size=2).map(str.encode)  # names stay names
mutations = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),  # where
        st.sampled_from(["put", "insert", "cut", "end", "copy"]),
        st.one_of(numbers, letters, st.binary(min_size=1, max_size=9)),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, head: int, steps: list[tuple[float, str, bytes]]) -> bytes:
    """Changes within the first `head` bytes."""
    for where, how, new in steps:
        at = int(where * min(head, len(data)))
        if how == "put":
            data = data[:at] + new + data[at + len(new) :]
        elif how == "insert":
            data = data[:at] + new + data[at:]
        elif how == "cut":
            data = data[:at] + data[at + len(new) :]
        elif how == "copy":
            data = data[:at] + data[at : at + 40] + data[at:]
        else:
            data = data[:at]
    return data


def read_everything(path: Path) -> str:
    """As a worker would, up to the decoder."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            raw = checkpoint.tensor(name)
            assert raw.shape == checkpoint.layout(name).shape
            unpack_into(raw, empty(raw.shape, "F32"), "F32")
        checkpoint.text_files()
        parse_config(checkpoint.hf_config)
    except CheckpointError:
        return "refused"
    except UnsupportedModel:
        return "unsupported"
    return "read"


def main(kind: str, source: Path, examples: int, folder: Path) -> None:
    original = source.read_bytes()
    if kind == "gguf":
        target, head = folder / "model.gguf", original.index(b"output_norm.weight") + 4000
        opened = target
    else:
        header = 8 + int.from_bytes(original[:8], "little")
        target, head = folder / "model.safetensors", header * 2  # as much of the values, too
        opened = folder
    target.write_bytes(original)
    assert read_everything(opened) == "read"
    outcomes: Counter[str] = Counter()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))

    @settings(
        max_examples=examples,
        deadline=2000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(mutations)
    def one(steps: list[tuple[float, str, bytes]]) -> None:
        target.unlink()  # readers of the last one may still map it
        target.write_bytes(mutate(original, head, steps))
        outcomes[read_everything(opened)] += 1

    one()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
