"""The pooling of an embedding model, read from the files of sentence-transformers.

modules.json lists the modules in the order of application. The first is the model; each other
module has a config.json in a separate folder.
"""

from pathlib import Path

from pdserve.engine.checkpoints.hf.json_file import (
    read_json,
    read_json_if_exists,
    read_json_list,
)
from pdserve.engine.checkpoints.source import CheckpointError, StoredPooling

MODULES = "modules.json"
KINDS = {"lasttoken": "last", "mean_tokens": "mean"}
MODE = "pooling_mode_"


def sentence_pooling(path: Path) -> StoredPooling | None:
    """Return the pooling; None without modules.json. Raises CheckpointError if not supported."""
    if not (path / MODULES).exists():
        return None
    modules = _modules(path / MODULES)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        names = ", ".join(kind[:40] for kind in kinds[:8]) or "none"
        raise CheckpointError(
            f"{path / MODULES} has the modules {names}: "
            "only Transformer, Pooling and Normalize are supported, in this order"
        )
    if modules[0][1]:
        raise CheckpointError(
            f"{path / MODULES}: a model in a subfolder is not supported: {modules[0][1]!r}"
        )
    settings = read_json_if_exists(path / "sentence_bert_config.json")
    if settings.get("do_lower_case"):
        raise CheckpointError(f"{path}: do_lower_case is not supported")
    max_len = settings.get("max_seq_length")
    if max_len is not None and (type(max_len) is not int or max_len < 1):
        raise CheckpointError(f"{path}: max_seq_length is {max_len!r}")
    kind = _kind(path / modules[1][1] / "config.json")
    return StoredPooling(kind, normalizes="Normalize" in kinds, max_len=max_len)


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return (class, folder) of each module, in order."""
    modules = []
    for entry in read_json_list(file):
        kind, folder = entry.get("type"), entry.get("path", "")
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise CheckpointError(f"{file} is not a list of modules")
        if folder and (Path(folder).name != folder or folder == ".."):
            raise CheckpointError(
                f"{file} names a folder that is not a direct subfolder: {folder[:80]!r}"
            )
        modules.append((kind.rpartition(".")[2], folder))
    return modules


def _kind(file: Path) -> str:
    """Return the pooling kind of the one mode that is set. Raises CheckpointError."""
    config = read_json(file)
    modes = [name.removeprefix(MODE) for name in sorted(config) if name.startswith(MODE)]
    chosen = [mode for mode in modes if config[MODE + mode]]
    if not modes and isinstance(config.get("pooling_mode"), str):
        chosen = [config["pooling_mode"]]
    if len(chosen) != 1 or chosen[0] not in KINDS:
        names = ", ".join(mode[:40] for mode in chosen[:8]) or "none"
        supported = " and ".join(KINDS)
        raise CheckpointError(
            f"{file}: pooling mode {names} is not supported (supported: {supported})"
        )
    return KINDS[chosen[0]]
