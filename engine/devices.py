"""Selects the device that computes."""

import logging

log = logging.getLogger(__name__)


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda" for a --device value. Raises ValueError if the value requires a GPU
    and none is usable."""
    if device == "cpu":
        return device
    problem = _gpu_problem()
    if not problem:
        return "cuda"
    if device != "auto":
        raise ValueError(f"--device {device}: {problem}")
    log.info("--device auto selects the CPU: %s", problem)
    return "cpu"


def _gpu_problem() -> str:
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
        return "torch finds no GPU; run nvidia-smi to check whether the driver finds one"
    return ""
