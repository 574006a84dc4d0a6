"""Reads a Hugging Face model directory: config.json; weights in one safetensors file or several;
tokenizer, chat template and token ids; and the pooling of an embedding model.

The pooling is read from sentence-transformers' files: modules.json lists the modules in the order
of application. The first is the model; each other module has a config.json in a separate folder.

A weight is one tensor of plain numbers, or several parts that the config's quantization method
reads (checkpoints/quantization): `x.weight` is then stored as `x.qweight`, `x.scales` and so on.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from tokenizers import Tokenizer

from pdserve.engine.checkpoints.hf.safetensors import SafetensorsReader
from pdserve.engine.checkpoints.quantization import QuantizationMethod, methods
from pdserve.engine.checkpoints.source import (
    CheckpointError,
    Layout,
    StoredPooling,
    TextFiles,
    check_no_pointer,
    unknown_tensor,
)
from pdserve.engine.checkpoints.text import (
    checked_ids,
    load_tokenizer,
    one_template,
    puts_before_prompt,
    with_token_names,
)
from pdserve.engine.weights import PLAIN, VALUES, RawTensor

MAX_BYTES = 64 << 20
MAX_JSON_BYTES = 4 << 20  # parsing may take thirty times as much; Gemma's largest has 1.1 MiB


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a whole file. Raises CheckpointError if it is unreadable or larger than `limit`."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if len(data) > limit:
        raise CheckpointError(f"{path} is larger than {limit} bytes")
    check_no_pointer(path, data)
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if the file is unreadable or holds
    anything else."""
    value = _parsed(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a list of JSON objects from a file. Raises CheckpointError if the file is unreadable or
    holds anything else."""
    value = _parsed(path)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise CheckpointError(f"{path} is not a list of JSON objects")
    return value


def _parsed(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error


def read_json_if_exists(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty one if the file is missing. Raises
    CheckpointError if the file holds anything else."""
    return read_json(path) if path.exists() else {}


def directory_text_files(path: Path, config: dict[str, Any]) -> TextFiles:
    """Read tokenizer, chat template and token ids from a model directory. `config` is its
    config.json. Raises CheckpointError if tokenizer.json is missing or a file is malformed."""
    if not (path / "tokenizer.json").exists():
        raise CheckpointError(f"{path} has no tokenizer.json")
    encoded = read_bytes(path / "tokenizer.json")
    tokenizer = load_tokenizer(encoded)
    tokenizer_config = read_json_if_exists(path / "tokenizer_config.json")
    generation = read_json_if_exists(path / "generation_config.json")
    size = tokenizer.get_vocab_size()
    ends = [_token_id(tokenizer, tokenizer_config.get("eos_token"))]
    text = config.get("text_config")  # of a model with a vision tower
    for source in (generation, config, text if isinstance(text, dict) else {}):
        ids = source.get("eos_token_id")
        ends += ids if isinstance(ids, list) else [ids]
    starts = (
        _token_id(tokenizer, tokenizer_config.get("bos_token")),
        generation.get("bos_token_id"),
        config.get("bos_token_id"),
    )
    bos = next((start for start in starts if checked_ids([start], size)), None)
    return TextFiles(
        tokenizer_json=encoded,
        chat_template=_template(path, tokenizer_config),
        generation_config=generation,
        eos_ids=checked_ids(ends, size),
        bos_id=bos,
        adds_bos=puts_before_prompt(tokenizer, bos),
    )


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """Return the id of a token, given as text or as {"content": text}; None if the vocabulary lacks
    it."""
    text = token.get("content") if isinstance(token, dict) else token
    token_id: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return token_id


def _template(path: Path, tokenizer_config: dict[str, Any]) -> str:
    """Read the chat template from the first of these files that has one: chat_template.jinja,
    chat_template.json, tokenizer_config.json. Empty if none has one."""
    if (path / "chat_template.jinja").exists():
        files = {"default": path / "chat_template.jinja"}
        files |= {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        templates = {
            name: read_bytes(file).decode("utf-8", "replace") for name, file in files.items()
        }
        return with_token_names(one_template(templates), _token_names(tokenizer_config))
    template = read_json_if_exists(path / "chat_template.json").get("chat_template")
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {e["name"]: e.get("template") for e in template if _is_named(e)}
    if isinstance(template, str):
        template = {"default": template}
    templates = template if isinstance(template, dict) else {}
    texts = {name: text for name, text in templates.items() if isinstance(text, str)}
    return with_token_names(one_template(texts), _token_names(tokenizer_config))


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _token_names(tokenizer_config: dict[str, Any]) -> dict[str, str | None]:
    """Return name -> text of the special tokens in tokenizer_config.json. bos and eos are left out,
    since their ids come from the model, unless the file says that the model has none: then they are
    None."""
    tokens = {name: token for name, token in tokenizer_config.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        tokens |= tokenizer_config[key] if isinstance(tokenizer_config.get(key), dict) else {}
    names: dict[str, str | None] = {}
    for name, token in tokens.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name in ("bos_token", "eos_token"):
            if token is None:
                names[name] = None
        elif isinstance(text, str):
            names[name] = text
    return names


MODULES = "modules.json"
KINDS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
MODE = "pooling_mode_"
# Settings of the module Transformer; sentence-transformers reads the first file that exists.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
INDEX = "model.safetensors.index.json"
# Files in which older tools describe the quantization.
METHOD_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def sentence_pooling(path: Path) -> StoredPooling | None:
    """Read the pooling of an embedding model from the directory's modules.json; None if there is no
    such file. Raises CheckpointError if the modules or settings are not supported."""
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
    files = (path / name for name in TRANSFORMER_SETTINGS)
    settings = next((read_json(file) for file in files if file.exists()), {})
    if settings.get("do_lower_case"):
        raise CheckpointError(f"{path}: do_lower_case is not supported")
    max_len = settings.get("max_seq_length")
    if max_len is not None and (type(max_len) is not int or max_len < 1):
        raise CheckpointError(f"{path}: max_seq_length is {max_len!r}: expected a positive integer")
    kind = _kind(path / modules[1][1] / "config.json")
    return StoredPooling(kind, normalizes="Normalize" in kinds, max_len=max_len)


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return (class name, folder) of each module that a modules.json lists, in order."""
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
    """Return "last", "mean" or "cls", the pooling that a module's config.json sets. Raises
    CheckpointError if it sets another or several."""
    config = read_json(file)
    modes = [name.removeprefix(MODE) for name in sorted(config) if name.startswith(MODE)]
    chosen = [mode for mode in modes if config[MODE + mode]]
    if not modes and isinstance(config.get("pooling_mode"), str):
        chosen = [config["pooling_mode"]]
    if len(chosen) != 1 or chosen[0] not in KINDS:
        names = ", ".join(mode[:40] for mode in chosen[:8]) or "none"
        supported = ", ".join(KINDS)
        raise CheckpointError(
            f"{file}: pooling mode {names} is not supported (supported: {supported})"
        )
    return KINDS[chosen[0]]


class DirectoryCheckpoint:
    """A Checkpoint that reads a Hugging Face model directory; its files stay mapped while any
    tensor is in use."""

    def __init__(self, path: Path) -> None:
        """Read the config and the headers of the weight files. Raises CheckpointError if a file is
        missing or malformed, or if the quantization method is not supported."""
        self._path = path
        if not (path / "config.json").exists():
            if (path / "adapter_config.json").exists():
                raise CheckpointError(
                    f"{path} is an adapter (LoRA), which pdserve does not load: merge it into its "
                    "base model (merge_and_unload of the package peft) and serve the result"
                )
            raise CheckpointError(f"{path} has no config.json: not a Hugging Face model directory")
        self._config = read_json(path / "config.json")
        shards, self._owner = _shards(path)
        self._readers = {name: SafetensorsReader(path / name) for name in shards}
        if not self._owner:
            for shard, reader in self._readers.items():
                self._owner |= dict.fromkeys(reader.names(), shard)
        for shard, reader in self._readers.items():
            present = set(reader.names())
            claimed = {name for name, owner in self._owner.items() if owner == shard}
            if claimed - present:
                missing = ", ".join(sorted(claimed - present)[:5])
                raise CheckpointError(f"{path / shard} lacks tensors that {INDEX} names: {missing}")
        self._method_file, settings = _quantization(path, self._config)
        self._method = _method(path, settings)
        self._quantized = self._method.find(self._owner) if self._method else {}
        if self._method and self._method.quantizes and not self._quantized:
            raise CheckpointError(
                f"{path}: the config names a quantization method, but no weight uses it"
            )
        self._names = self._find_names()

    @property
    def hf_config(self) -> dict[str, Any]:
        return self._config

    @property
    def files(self) -> tuple[str, ...]:
        paths = [str(reader.path) for reader in self._readers.values()]
        return (*paths, *([str(self._method_file)] if self._method else []))

    @property
    def text_paths(self) -> tuple[str, ...]:
        return tuple(str(path) for path in sorted(self._path.glob("*.j*")))

    def names(self) -> Collection[str]:
        return self._names

    def layout(self, name: str) -> Layout:
        if name not in self._quantized:
            return self._reader(name).layout(name)
        assert self._method is not None
        with self._read_errors(name):
            return self._method.layout(self._stored_parts(name))

    def tensor(self, name: str) -> RawTensor:
        if name in self._quantized:
            assert self._method is not None
            with self._read_errors(name):
                raw = self._method.read(self._stored_parts(name))
                layout = self.layout(name)
                if (raw.format, raw.shape) != layout:
                    read = f"{raw.format} {list(raw.shape)}"
                    raise ValueError(
                        f"the stored parts give {read}, "
                        f"expected {layout.format} {list(layout.shape)}"
                    )
                return raw
        if name not in self._owner:
            raise unknown_tensor(name, self.names())
        kind, shape = self.layout(name)
        reader = self._reader(name)
        if kind not in PLAIN:
            supported = ", ".join(PLAIN)
            raise CheckpointError(f"{reader.path}: tensor {name} is {kind}; supported: {supported}")
        return RawTensor({VALUES: reader.array(name)}, kind, shape)

    def release(self, name: str) -> None:
        for stored in self._quantized.get(name, {"": name}).values():
            self._reader(stored).release(stored)

    def text_files(self) -> TextFiles:
        return directory_text_files(self._path, self._config)

    def pooling(self) -> StoredPooling | None:
        return sentence_pooling(self._path)

    def _find_names(self) -> frozenset[str]:
        parts = {full for parts in self._quantized.values() for full in parts.values()}
        unused = tuple(f".{leaf}" for leaf in self._method.unused) if self._method else ()
        names = {name for name in self._owner if not (unused and name.endswith(unused))}
        if self._method and self._method.adds_zero_biases:
            biases = {name.removesuffix("weight") + "bias" for name in self._quantized}
            names = {
                name for name in names if name not in biases or self._reader(name).array(name).any()
            }
        return frozenset(names - parts | self._quantized.keys())

    def _stored_parts(self, name: str) -> dict[str, NDArray[Any]]:
        for full in self._quantized[name].values():
            if (kind := self._reader(full).layout(full).format) == "F8_E5M2":
                raise ValueError(f"{full} is {kind}: expected F8_E4M3")
        return {
            part: self._reader(full).array(full) for part, full in self._quantized[name].items()
        }

    @contextmanager
    def _read_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, LookupError, ArithmeticError) as error:
            raise CheckpointError(
                f"{self._path}: cannot read the quantized tensor {name}: {error}"
            ) from error

    def _reader(self, stored: str) -> SafetensorsReader:
        return self._readers[self._owner[stored]]


def _quantization(path: Path, config: Mapping[str, Any]) -> tuple[Path, Any]:
    """Return (file that describes the quantization of the weights, the description); the
    description is None if the weights are not quantized."""
    settings = config.get("quantization_config")
    settings = config.get("compression_config") if settings is None else settings
    has_method = isinstance(settings, dict) and "quant_method" in settings
    if isinstance(config.get("quantization"), dict) and not has_method:  # MLX names no method
        settings = {"quant_method": "mlx"}
    if settings is None:
        for name, method in METHOD_FILES.items():
            if (path / name).exists():
                return path / name, {"quant_method": method, **read_json(path / name)}
    return path / "config.json", settings


def _method(path: Path, settings: Any) -> QuantizationMethod | None:
    """Return the quantization method that `settings` name; None without settings. Raises
    CheckpointError if the method or a setting is not supported."""
    if settings is None:
        return None
    unnamed = "an unnamed method"
    name = settings.get("quant_method", unnamed) if isinstance(settings, dict) else settings
    if not isinstance(name, str) or name not in methods():
        supported = ", ".join(sorted(methods()))
        raise CheckpointError(
            f"{path}: quantization method {name!r} is not supported (supported: {supported})"
        )
    try:
        return methods()[name](settings)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: quantization_config of {name}: {error}") from error


def _shards(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return (names of the weight files, tensor name -> file name); the mapping is empty if there
    is only one file without an index."""
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        shards = sorted({str(shard) for shard in weight_map.values()})
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise CheckpointError(f"{path / INDEX} names a file outside its folder: {outside[0]}")
        missing = [shard for shard in shards if not (path / shard).exists()]
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} shards: {', '.join(missing[:5])}")
        return shards, {str(name): str(shard) for name, shard in weight_map.items()}
    single = sorted(file.name for file in path.glob("*.safetensors"))
    if "model.safetensors" in single:
        single = ["model.safetensors"]
    if len(single) != 1:
        actual = f"several without {INDEX}: {', '.join(single[:5])}" if single else "none"
        raise CheckpointError(f"{path}: expected one *.safetensors file, found {actual}")
    return single, {}
