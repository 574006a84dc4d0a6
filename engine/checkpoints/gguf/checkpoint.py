"""Presents a GGUF model, in one file or split over several, in Hugging Face's terms: its weights,
and the tokenizer, chat template and token ids in its metadata."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.gguf.mapping import (
    GgufMapping,
    Metadata,
    ReadMetadata,
    common_config,
)
from pdserve.engine.checkpoints.gguf.reader import Place, merge, raw_tensor, read_shards
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.engine.checkpoints.source import (
    CheckpointError,
    Layout,
    StoredPooling,
    TextFiles,
    unknown_tensor,
)
from pdserve.engine.checkpoints.text import (
    checked_ids,
    load_tokenizer,
    one_template,
    puts_before_prompt,
    turn_end_ids,
    with_token_names,
)
from pdserve.engine.weights import VALUES, RawTensor
from pdserve.engine.weights.convert import unpack

END_KEYS = ("eos", "eot", "eom")  # of sequence, of turn, of message
END_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "</s>", "<eos>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
)  # fmt: skip
# Tokens that end only a part of an answer if the vocabulary also has the other tokens.
PARTIAL_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
# Separators of files in a code prompt, by metadata key; Qwen's texts if the key is missing.
FILE_SEPARATORS = {"fim_pad": "<|fim_pad|>", "fim_rep": "<|repo_name|>", "fim_sep": "<|file_sep|>"}
_TEMPLATE = "tokenizer.chat_template"
_TOKENS = {
    "pad": "tokenizer.ggml.padding_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",  # GGUF's spelling
    "cls": "tokenizer.ggml.cls_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
}


def end_ids(metadata: Metadata, id_of: Callable[[str], int | None]) -> Sequence[object]:
    """Return the ids of the tokens that end a generation, those named by the file first; they may
    be invalid or repeated. `id_of` returns the id of a token's text, or None if the vocabulary
    lacks it."""
    return list(_ends(metadata, id_of))


def _ends(metadata: Metadata, id_of: Callable[[str], int | None]) -> Iterator[object]:
    for key in END_KEYS:
        yield metadata.get(f"tokenizer.ggml.{key}_token_id")
    present = {text for text in END_TEXTS if id_of(text) is not None}
    not_ends = {text for text, others in PARTIAL_ENDS if others <= present}
    for text in END_TEXTS:
        if text in present - not_ends:
            yield id_of(text)
    for key, text in FILE_SEPARATORS.items():
        yield metadata.get(f"tokenizer.ggml.{key}_token_id", id_of(text))


def gguf_text_files(metadata: Metadata) -> TextFiles:
    """Build tokenizer, chat template and token ids from GGUF metadata. Raises CheckpointError if
    the tokenizer is not supported."""
    encoded = tokenizer_json(metadata)
    tokenizer = load_tokenizer(encoded)
    templates = {"default": metadata.get(_TEMPLATE)} | {
        name.removeprefix(f"{_TEMPLATE}."): text
        for name, text in metadata.items()
        if name.startswith(f"{_TEMPLATE}.")
    }
    texts = {name: text for name, text in templates.items() if isinstance(text, str)}
    tokens = {
        f"{name}_token": tokenizer.id_to_token(metadata[key])
        for name, key in _TOKENS.items()
        if checked_ids([metadata.get(key)], tokenizer.get_vocab_size())
    }
    template = with_token_names(one_template(texts), tokens)
    ends = [*end_ids(metadata, tokenizer.token_to_id), *sorted(turn_end_ids(tokenizer, template))]
    size = tokenizer.get_vocab_size()
    bos = checked_ids([metadata.get("tokenizer.ggml.bos_token_id")], size)
    bos_id = bos[0] if bos else None
    return TextFiles(
        tokenizer_json=encoded,
        chat_template=template,
        eos_ids=checked_ids(ends, size),
        bos_id=bos_id,
        adds_bos=puts_before_prompt(tokenizer, bos_id),
    )


# Tensors with divisors of rope's frequencies, by their names in mapping.py.
ROPE_FACTORS = {
    "factors": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}

POOLING_TYPES = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.h

# general.architecture -> (Hugging Face class name, mapping); raises CheckpointError
FindMapping = Callable[[str], tuple[str, GgufMapping]]


class GgufCheckpoint:
    """A Checkpoint that reads a GGUF model; the path of any part of a split model opens all
    parts."""

    def __init__(self, path: Path, find_mapping: FindMapping) -> None:
        """Read the headers of the model's files. Raises CheckpointError if a file is missing or
        malformed, or if the architecture, a tensor or a metadata key is not supported."""
        readers = read_shards(path)
        self._metadata = readers[0].metadata
        self._paths = tuple(str(reader.path) for reader in readers)
        arch = self._metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{path}: metadata key general.architecture is missing")
        architecture, self._mapping = find_mapping(arch)
        stored = merge(readers)
        factors = {
            key: unpack(raw_tensor(*stored.pop(name), name)).tolist()
            for key, name in ROPE_FACTORS.items()
            if name in stored
        }
        if "token_embd.weight" not in stored:
            raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
        self._tensors: dict[str, Place] = {}
        for name, place in stored.items():
            hf_name = self._mapping.hf_name(name)
            if hf_name is None:
                raise CheckpointError(f"{path}: tensor {name} is not known for {arch}")
            self._tensors[hf_name] = place
        metadata = ReadMetadata(self._metadata)
        with _well_formed(path):
            self._values = dict(_values(self._metadata, self._mapping))
            shapes = {name: info.shape for name, (_, info) in stored.items()}
            common = common_config(metadata, shapes, factors)
            overrides = self._mapping.config(metadata)
        if unknown := metadata.unread_keys():
            raise CheckpointError(f"{path}: metadata keys of {arch} are not supported: {unknown}")
        if self._mapping.scorer:
            dense = shapes.get("cls.weight", ())
            if common["num_labels"]:
                architecture = self._mapping.scorer
            if len(set(dense)) != 1 if common["num_labels"] else len(set(dense)) > 1:
                raise CheckpointError(
                    f"{path}: the head that scores is incomplete, as in files of BERT's "
                    "cross-encoders, from which llama.cpp's converter leaves a layer out: use the "
                    "model's safetensors"
                )
        vocab_size = stored["token_embd.weight"][1].shape[0]
        self._config = {
            "architectures": [architecture],
            "vocab_size": vocab_size,
            **common,
            **overrides,
        }

    @property
    def hf_config(self) -> dict[str, Any]:
        return self._config

    @property
    def files(self) -> tuple[str, ...]:
        return self._paths

    @property
    def text_paths(self) -> tuple[str, ...]:
        return self._paths[:1]

    def names(self) -> Collection[str]:
        return self._tensors.keys() | self._values.keys()

    def layout(self, name: str) -> Layout:
        if name in self._values:
            return Layout("F32", self._values[name].shape)
        info = self._tensors[name][1]
        return Layout(info.format, info.shape)

    def tensor(self, name: str) -> RawTensor:
        if name in self._values:
            return RawTensor({VALUES: self._values[name]}, "F32", self._values[name].shape)
        if name not in self._tensors:
            raise unknown_tensor(name, self._tensors)
        raw = raw_tensor(*self._tensors[name], name)
        if key := self._mapping.heads_key(name):
            heads = self._config.get(key, self._config["num_attention_heads"])
            return _unpermuted(raw, heads, name)
        if self._mapping.norm_offset and name.endswith("norm.weight") and raw.format == "F32":
            values = raw.parts[VALUES] - np.float32(self._mapping.norm_offset)
            return RawTensor({VALUES: values}, raw.format, raw.shape)
        return raw

    def release(self, name: str) -> None:
        if name in self._values:
            return
        file, info = self._tensors[name]
        file.release(info.start, raw_tensor(file, info, name).nbytes)

    def text_files(self) -> TextFiles:
        with _well_formed(self._paths[0]):
            return gguf_text_files(self._metadata)

    def pooling(self) -> StoredPooling | None:
        arch = self._metadata["general.architecture"]
        key = f"{arch}.pooling_type"
        pooling_type = self._metadata.get(key, 0)
        name = (
            POOLING_TYPES.get(pooling_type, str(pooling_type))
            if isinstance(pooling_type, int)
            else repr(pooling_type)
        )
        if name == "none":
            return None
        if name not in ("mean", "cls", "last"):
            text = f"{self._paths[0]}: {key} is {name}: only mean, cls and last are supported"
            raise CheckpointError(text)
        # llama.cpp normalizes all embeddings; Ollama's converter states what the model does.
        normalizes = bool(self._metadata.get(f"{arch}.normalize_embeddings", True))
        return StoredPooling(name, normalizes)


def _values(metadata: Metadata, mapping: GgufMapping) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the names and values of the tensors that the file has as metadata."""
    for key, (name, shape) in mapping.values.items():
        for n, value in enumerate(metadata.get(key, ())):
            yield name.replace("{n}", str(n)), np.full(shape, value, np.float32)


@contextmanager
def _well_formed(path: Path | str) -> Iterator[None]:
    """Convert errors that malformed metadata causes in the context to CheckpointError, which names
    `path`."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the metadata is malformed: {error}") from error


def _unpermuted(raw: RawTensor, heads: int, name: str) -> RawTensor:
    """Reorder a q or k matrix's rows from GGML's order for rope (a pair's rows are neighbours) to
    Hugging Face's (a pair's rows are half a head apart).

    Only whole rows move, so this also works on quantized blocks.
    """
    if not isinstance(heads, int) or heads < 1 or raw.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{name}: {raw.shape[0]} rows cannot be split into pairs for {heads} heads"
        )
    order = np.arange(raw.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2)
    return raw.rows(order.reshape(-1))
