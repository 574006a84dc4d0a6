"""Checkpoints under the names that their models request."""

from pathlib import Path

import numpy as np

from pdserve.engine.checkpoints import ViewedCheckpoint
from pdserve.engine.load import find_spec, open_checkpoint
from pdserve.engine.weights.convert import unpack


def viewed(path: Path) -> ViewedCheckpoint:
    """Return the checkpoint under the names that its model requests."""
    checkpoint = open_checkpoint(path)
    spec = find_spec(checkpoint.hf_config)
    return spec.view(checkpoint, spec.parse(checkpoint.hf_config))


def assert_same_tensors(gguf: Path, folder: Path) -> None:
    got, expected = viewed(gguf), viewed(folder)
    names = set(expected.names())
    assert set(got.names()) == names
    for name in names:
        a, b = got.tensor(name), expected.tensor(name)
        assert a.shape == b.shape
        assert got.layout(name) == (a.format, a.shape)
        values = unpack(b)
        # Gemma's norms lose a bit when one is added and subtracted again.
        slack = 1e-6 if name.endswith("norm.weight") else 0
        np.testing.assert_allclose(unpack(a), values, rtol=0, atol=slack)
