"""Read a model as a worker would, up to the decoder."""

from pathlib import Path

from pdserve.engine.architectures import parse_config
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.load import open_checkpoint
from pdserve.engine.models import UnsupportedModel
from pdserve.engine.weights import empty, unpack_into


def read_everything(path: Path) -> str:
    """Return the outcome. Raises every error except those that a worker reports in one line."""
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
