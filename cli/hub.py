"""`pdserve pull`, `pdserve ls` and `pdserve rm`: the models on this machine, which are those in the
cache of huggingface-hub and the default one.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime

from pdserve.cli.options import CommandError, Settings
from pdserve.cli.table import table

SIZE_UNITS = ("B", "KB", "MB", "GB", "TB")


def pull(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Download a model, unless the cache has it, and print its path; return the exit code. Raises
    CommandError if it cannot be downloaded."""
    from pdserve.cli.progress import progress_on
    from pdserve.engine.checkpoints import CheckpointError, HubModel, find
    from pdserve.engine.checkpoints.resolve import download

    view = progress_on(sys.stderr)
    try:
        location = find(positionals["model"])
        path = download(location, view.update) if isinstance(location, HubModel) else location
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    finally:
        view.close()
    print(path)
    return 0


def ls(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Print a table of the models on this machine; return the exit code."""
    print(table(("model", "size", "changed"), list(_rows())), end="")
    return 0


def _rows() -> Iterator[tuple[str, str, str]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    from pdserve.engine.api.default_model import default_model
    from pdserve.engine.checkpoints.quantization_tags import gguf_models
    from pdserve.engine.checkpoints.resolve import served_name

    if path := default_model():
        yield (
            f"{served_name(path)} (default)",
            _size(path.stat().st_size),
            _day(path.stat().st_mtime),
        )
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:  # nothing was ever downloaded
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        files = {
            str(file.file_path.relative_to(revision.snapshot_path)): file
            for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified)
            for file in revision.files
        }
        for name, parts in gguf_models(files).items():
            yield (
                f"{repo.repo_id}:{name}",
                _size(sum(files[part].size_on_disk for part in parts)),
                _day(max(files[part].blob_last_modified for part in parts)),
            )
        suffixes = {file.file_path.suffix for file in files.values()}
        if ".safetensors" in suffixes and ".gguf" not in suffixes:
            yield repo.repo_id, _size(repo.size_on_disk), _day(repo.last_modified)


def rm(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Remove all files of a repository from the cache, and print how much that frees; return the
    exit code. Raises CommandError if the cache does not have it."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    from pdserve.engine.checkpoints import CheckpointError, HubModel, find

    try:
        model = find(positionals["model"])
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if not isinstance(model, HubModel):
        raise CommandError(
            f"{model} is not in the cache of huggingface-hub; remove the file itself"
        )
    if model.file or model.quant or model.revision:  # an empty `quant` is no tag
        raise CommandError(
            f"all files of a repository are removed together: `pdserve rm {model.repo}`"
        )
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        cache = None
    repos = [
        repo
        for repo in (cache.repos if cache else ())
        if repo.repo_type == "model" and repo.repo_id == model.repo
    ]
    if cache is None or not repos:
        raise CommandError(f"{model.repo} is not in the cache; `pdserve ls` lists what is")
    # Another repository may have a revision with the same hash.
    cache = replace(cache, repos=frozenset(repos))
    strategy = cache.delete_revisions(*(r.commit_hash for repo in repos for r in repo.revisions))
    strategy.execute()
    print(f"removed {model.repo}: {_size(strategy.expected_freed_size)}")
    return 0


def _size(num_bytes: float) -> str:
    for unit in SIZE_UNITS[:-1]:
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {SIZE_UNITS[-1]}"


def _day(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d")
