"""The check of models that `pdserve up` makes before it starts any process that serves: it finds or
downloads their files, and checks them against the options."""

from collections.abc import Callable, Sequence
from typing import Any

from pdserve.engine import load
from pdserve.engine.api import EngineConfig
from pdserve.services.common.logs import configure_logging


def run(
    configs: Sequence[EngineConfig],
    log_level: str,
    log_format: str,
    report: Callable[[str, dict[str, Any]], None],
) -> int:
    """Check the models, as the task of a child process, and report for each its served name and
    whether it uses prefill workers. Raises CheckpointError and ConfigError."""
    configure_logging("model check", log_level, log_format=log_format)
    load.log.disabled = True  # the workers log the same when they load the model

    def progress(activity: str, fraction: float) -> None:
        if fraction:  # a download, unlike the rest, takes long
            report("loading", {"what": activity, "fraction": fraction})

    prepared = [load.prepare_model(config, progress) for config in configs]
    # Decode workers compute embeddings and the scores of classification heads.
    models = [
        {"name": model.served_name, "uses_prefill": model.task.pooling is None}
        for model in prepared
    ]
    report("checked", {"models": models})
    return 0
