"""The check of models that `pdserve up` makes before it starts any process that serves: it finds or
downloads their files, and checks them against the options."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.engine.api import EngineConfig
from pdserve.engine.load import prepare_model

ENTRY = f"{__name__}:run"


def run(configs: Sequence[EngineConfig], report: Callable[[str, dict[str, Any]], None]) -> int:
    """Check the models, as the task of a child process, and report for each whether prefill workers
    compute prompts of it. Raises CheckpointError and ConfigError."""
    logging.disable(logging.WARNING)  # the workers log the same when they load the model

    def progress(activity: str, fraction: float) -> None:
        if fraction:  # a download, unlike the rest, takes long
            report("loading", {"what": activity, "fraction": fraction})

    tasks = [prepare_model(config, progress).task for config in configs]
    # Decode workers compute embeddings and the scores of classification heads.
    report("checked", {"use_prefill": [task.pooling is None for task in tasks]})
    return 0
