"""The digest of a model's weights, and the short name of their dominant format.

The digest is the root of a Merkle tree (RFC 6962: leaves prefixed 0, nodes 1) over the tensors
sorted by name. A leaf hashes name, format, shape and the SHA-256 of the stored bytes in Hugging
Face's row order, so the digest identifies the weights and not the files that hold them.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights import PLAIN, RawTensor
from pdserve.engine.weights import VERSION as QUANTIZER

LABELS = {"F32": "float32", "F16": "float16", "BF16": "bf16", "F64": "float64"}


def quantization_label(layouts: Iterable[Layout]) -> str:
    """Return the format of most matrix weights, by number of values, e.g. "Q4_1", "bf16"."""
    assert LABELS.keys() == PLAIN.keys()
    values: Counter[str] = Counter()
    for stored in layouts:
        if len(stored.shape) > 1:
            values[stored.format] += math.prod(stored.shape)
    dominant = values.most_common(1)[0][0]
    return LABELS.get(dominant, dominant)


def leaf(name: str, raw: RawTensor) -> bytes:
    """Return the hash of one tensor. For several parts, it covers their hashes in the order of
    their names; for reordered columns, also their order."""
    hashes = {
        part: hashlib.sha256(np.ascontiguousarray(array).data) for part, array in raw.parts.items()
    }
    if len(hashes) == 1:
        (digest,) = hashes.values()
        content = digest.digest()
    else:
        description = [
            [part, array.dtype.str, list(array.shape), hashes[part].hexdigest()]
            for part, array in sorted(raw.parts.items())
        ]
        content = hashlib.sha256(json.dumps(description).encode()).digest()
    if raw.columns is not None:
        content = hashlib.sha256(content + raw.columns.tobytes()).digest()
    head = json.dumps([name, raw.format, list(raw.shape)], separators=(",", ":")).encode()
    return hashlib.sha256(b"\0" + content + head).digest()


def quantized_digest(digest: str, formats: Mapping[str, str]) -> str:
    """Return the digest of weights that are quantized at load: over the digest of the stored
    weights, the quantizer's version and the format of each quantized tensor, by name."""
    content = [digest, QUANTIZER, sorted(formats.items())]
    return hashlib.sha256(b"quantized " + json.dumps(content).encode()).hexdigest()


def merkle_root(leaves: Mapping[str, bytes]) -> str:
    """Return the hex root over the leaves in name order; an odd node moves up unchanged."""
    level = [leaves[name] for name in sorted(leaves)]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [
            hashlib.sha256(b"\1" + b"".join(p)).digest() if len(p) > 1 else p[0] for p in pairs
        ]
    return level[0].hex() if level else hashlib.sha256(b"").hexdigest()
