"""Selects the device that computes."""

import logging

log = logging.getLogger(__name__)


def resolve_device(asked: str) -> str:
    """Return "cpu" or "cuda" for a --device value. Raises ValueError if the value requires a GPU
    and none is usable."""
    if asked == "cpu":
        return asked
    obstacle = _obstacle()
    if not obstacle:
        return "cuda"
    if asked != "auto":
        raise ValueError(f"--device {asked}: {obstacle}")
    log.info("--device auto computes on the CPU: %s", obstacle)
    return "cpu"


def _obstacle() -> str:
    """Return why no GPU can compute; empty if one can."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed: pip install 'pdserve[torch]'"
    except (ImportError, OSError) as err:  # a library that torch needs is missing
        return f"torch cannot be imported: {err}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU; nvidia-smi tells whether the driver does"
    return ""
