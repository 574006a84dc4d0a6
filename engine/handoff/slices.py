"""A frame's bytes into the pool, some layers at a time: the streams of decode wait meanwhile.

Between two slices the attempt may end and its blocks may get another owner, so whoever calls asks
before each whether it still holds them.
"""

from collections.abc import Callable

from pdserve.engine.handoff.direct import Parcel
from pdserve.engine.handoff.incoming import WritableKv
from pdserve.engine.handoff.layout import Piece

SLICE_BYTES = 256 << 10  # written between two looks at the clock: about 0.1 ms


def copy_some(
    kv: WritableKv,
    parcel: Parcel,
    piece: Piece,
    blocks: list[int],
    clock: Callable[[], float],
    end: float,
) -> bool:
    """Writes on from where the last call stopped, at least one slice; True: all is written."""
    assert isinstance(parcel.payload, memoryview)
    size = len(parcel.payload) // len(piece.layers)
    most = max(1, SLICE_BYTES // size)
    while parcel.num_layers < len(piece.layers):
        layers = piece.layers[parcel.num_layers : parcel.num_layers + most]
        at = parcel.num_layers * size
        kv.write(piece.group, layers, blocks, parcel.payload[at : at + len(layers) * size])
        parcel.num_layers += len(layers)
        if clock() >= end:
            break
    return parcel.num_layers == len(piece.layers)
