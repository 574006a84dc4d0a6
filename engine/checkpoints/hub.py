"""Downloads models from the Hugging Face hub into its usual cache: weights and data, no code."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.engine.checkpoints.gguf.shards import shard_names
from pdserve.engine.checkpoints.source import CheckpointError

DIRECTORY_FILES = ("*.safetensors", "*.json", "*.jinja")
# Subfolders hold the model in other formats; "consolidated" is a second copy of the weights.
# Subfolders that begin with a digit are modules of sentence-transformers: only configs are needed.
IGNORED = ("[!0-9]*/*", "*/*/*", "*/*.safetensors", "consolidated*")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository at a revision, or one GGUF file in it."""

    repo: str
    revision: str | None = None  # None: main
    file: str | None = None


def download(
    model: HubModel, progress: Callable[[str, float], None], cache: Path | None = None
) -> Path:
    """Download what is not cached; return the snapshot's directory, or the file in it.

    HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE have their usual effects; `cache`
    overrides HF_HUB_CACHE. Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    patterns = list(shard_names(model.file) if model.file else DIRECTORY_FILES)
    bar = _bar(model.repo, progress)
    try:
        folder = snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=cache,
            endpoint=os.environ.get("HF_ENDPOINT"),
            allow_patterns=patterns,
            ignore_patterns=None if model.file else list(IGNORED),
            tqdm_class=bar,
        )
    except Exception as error:  # the package and its HTTP client have no common base class
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{model.repo} is not a local path and cannot be downloaded from the hub: {reason}"
        ) from error
    path = Path(folder)
    if model.file is None:
        return path
    if not (path / model.file).exists():
        raise CheckpointError(f"{model.repo} has no file {model.file}")
    return path / model.file


def _bar(repo: str, progress: Callable[[str, float], None]) -> Any:
    """Return a subclass of tqdm that reports bytes to `progress` and draws nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm  # untyped
    highest = 0.0

    class Bar(base):  # type: ignore[misc]
        monitor_interval = 0  # no thread

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **kwargs: Any) -> None:
            """Draw nothing."""

        def update(self, n: float | None = 1) -> None:
            nonlocal highest
            self.n += n or 0
            if self.unit == "B" and self.total:
                # The total grows as files are found; the reported fraction must not decrease.
                highest = max(highest, min(1.0, self.n / self.total))
                progress(f"fetching {repo}", highest)

        def close(self) -> None:
            """Do nothing: the bar holds no resource."""

    return Bar
