"""Resolves the `--model` option to a path on this machine and a name to serve the model by;
downloads models from the Hugging Face hub."""

import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.engine.api.default_model import NO_DEFAULT_MODEL, default_model
from pdserve.engine.checkpoints.gguf import shard_names
from pdserve.engine.checkpoints.quantization_tags import (
    PART_SUFFIX,
    QUANT_SUFFIX,
    choose_file,
    gguf_models,
)
from pdserve.engine.checkpoints.source import CheckpointError

DIRECTORY_FILES = ("*.safetensors", "*.json", "*.jinja")
# Subfolders hold the model in other formats; "consolidated" is a second copy of the weights.
# Subfolders that begin with a digit are modules of sentence-transformers: only configs are needed.
IGNORED = ("[!0-9]*/*", "*/*/*", "*/*.safetensors", "consolidated*")
HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>[\w./-]+))?(:((?P<file>[\w./ -]+\.gguf)|(?P<quant>[\w-]+)))?"
)
# A snapshot of a repository in the cache of the hub, or a file in it.
HUB_CACHE = re.compile(
    r"/models--((?P<org>[\w.-]+?)--)?(?P<name>[\w.-]+)/snapshots/[0-9a-f]{40}(/.+\.gguf)?$"
)
HUB_PREFIX = re.compile(r"hf://|https://(hf|huggingface)\.co/|(hf|huggingface)\.co/(?=[^/]+/)")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hugging Face hub: a repository at a revision, or one GGUF file in it: that
    with the name `file`, or else the one that the tag `quant` selects."""

    repo: str
    revision: str | None = None  # None: main
    file: str | None = None
    quant: str | None = None  # e.g. "Q4_K_M"; empty: any quantization

    @property
    def is_gguf(self) -> bool:
        return self.file is not None or self.quant is not None


def download(
    model: HubModel, progress: Callable[[str, float], None], cache: Path | None = None
) -> Path:
    """Download the files of a hub model that are not cached. Return the directory of the
    repository's snapshot, or the path of the GGUF file in it.

    HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE have their usual effects; `cache`
    overrides HF_HUB_CACHE. Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    if model.quant is not None:
        file = choose_file(_gguf_files(model, cache), model.quant, model.repo)
        model = HubModel(model.repo, model.revision, file)
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
        raise _unavailable(model.repo, error) from error
    path = Path(folder)
    if model.file is None:
        return path
    if not (path / model.file).exists():
        raise CheckpointError(f"the hub repository {model.repo} has no file {model.file}")
    return path / model.file


def _gguf_files(model: HubModel, cache: Path | None) -> list[str]:
    """Return the names of the GGUF files of a repository on the hub; of those in the cache, if the
    hub cannot be reached. Raises CheckpointError if neither is available."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        names = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).list_repo_files(
            model.repo, revision=model.revision
        )
    except Exception as error:  # as in `download`
        try:
            folder = snapshot_download(
                model.repo, revision=model.revision, cache_dir=cache, local_files_only=True
            )
        except Exception:
            raise _unavailable(model.repo, error) from error
        names = [str(path.relative_to(folder)) for path in Path(folder).rglob("*.gguf")]
    return [name for name in names if name.endswith(".gguf")]


def _unavailable(repo: str, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(
        f"{repo} is not a local path and cannot be downloaded from the hub: {reason}"
    )


def _bar(repo: str, progress: Callable[[str, float], None]) -> Any:
    """Return a subclass of tqdm that draws no progress bar and reports the downloaded fraction to
    `progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm  # untyped
    highest = 0.0

    class Bar(base):  # type: ignore[misc]
        monitor_interval = 0  # no thread

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **kwargs: Any) -> None:
            """Draw nothing; progress goes to the callback."""

        def update(self, n: float | None = 1) -> None:
            nonlocal highest
            self.n += n or 0
            if self.unit == "B" and self.total:
                # The total grows as files are found; the reported fraction must not decrease.
                highest = max(highest, min(1.0, self.n / self.total))
                progress(f"fetching {repo}", highest)

        def close(self) -> None:
            """Do nothing: this progress bar holds no resource."""

    return Bar


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model's path on this machine and the name by which clients request it."""

    path: Path  # a GGUF file or a model directory
    name: str


def resolve(model: str, progress: Callable[[str, float], None]) -> Resolved:
    """Resolve a model, and download it if needed. `model` is a GGUF file, a model directory, or a
    Hugging Face id; empty means the shipped model. An id is org/name, org/name@revision, and either
    with :file.gguf or with the tag of a quantization (:Q4_K_M); it may begin with hf.co/. An id
    with "GGUF" in its name selects a GGUF file without a tag, too. An existing path takes
    precedence over an id. A directory of one GGUF model, without safetensors files, is that model.
    Raises CheckpointError, which names the accepted forms.
    """
    location = find(model)
    if isinstance(location, HubModel):
        return Resolved(download(location, progress), location.repo)
    path = _gguf_in(location) or location
    return Resolved(path, served_name(path))


def find(model: str) -> Path | HubModel:
    """Return the path of a model on this machine, or the hub model that `model` names, without
    downloading it. Raises CheckpointError if `model` is neither."""
    if not model:
        if shipped := default_model():
            return shipped
        raise CheckpointError(NO_DEFAULT_MODEL)
    path = Path(os.path.expanduser(model))  # os.path functions never raise here, unlike pathlib
    if os.path.exists(path):
        return path
    match = HUB_ID.fullmatch(model.removeprefix(_hub_prefix(model)))
    is_file = match is not None and match[0] == model == match["repo"] and path.suffix == ".gguf"
    if match is None or is_file or model.endswith("/") or path.is_absolute() or ".." in model:
        raise CheckpointError(
            f"no model {model!r}: neither an existing GGUF file or directory nor a Hugging Face id"
            " (org/name, org/name@revision, org/name:file.gguf or org/name:Q4_K_M)"
        )
    quant = match["quant"]
    if quant is None and match["file"] is None and "gguf" in match["repo"].lower():
        quant = ""
    return HubModel(match["repo"], match["revision"], match["file"], quant)


def _gguf_in(folder: Path) -> Path | None:
    """Return the GGUF model in a directory without safetensors files; None if there is none."""
    try:
        names = os.listdir(folder)
    except OSError:  # a file, or a directory that the checkpoint's reader reports
        return None
    if any(name.endswith(".safetensors") for name in names):
        return None
    models = sorted(gguf_models(names))
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} has {len(models)} GGUF models; name one of them: {', '.join(models[:20])}"
        )
    return folder / models[0] if models else None


def _hub_prefix(model: str) -> str:
    match = HUB_PREFIX.match(model)
    return match[0] if match else ""


def served_name(path: Path) -> str:
    """Return the name by which a local model is served: that of its directory, or of its GGUF file
    without the suffixes of quantization and part; in the hub's cache, that of the repository. Names
    of symbolic links count, not those of their targets."""
    path = Path(os.path.abspath(path))
    if match := HUB_CACHE.search(str(path)):
        return "/".join(filter(None, (match["org"], match["name"])))
    if path.is_dir():
        return path.name
    stem = PART_SUFFIX.sub("", path.stem)
    return QUANT_SUFFIX.sub("", stem) or stem
