"""Writes GGUF files of tiny encoders with the gguf package's writer and name tables.

Independent of the reader under test: names and metadata follow llama.cpp's converter
(conversion/bert.py).
"""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, PoolingType, TokenType
from safetensors.torch import load_file, save_file

SPACE = "\u2581"
POOLING = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS}
MODES = {  # of sentence-transformers
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_lasttoken": PoolingType.LAST,
}
SPECIAL = {  # of the tiny tokenizers: GGUF's name -> texts
    "bos": ("<s>", "[CLS]"),
    "eos": ("</s>", "[SEP]"),
    "unknown": ("<unk>", "[UNK]"),
    "seperator": ("</s>", "[SEP]"),
    "padding": ("<pad>", "[PAD]"),
}


def write_encoder_gguf(
    source: Path,
    target: Path,
    kind: str = "F32",
    *,
    rounded: Path | None = None,
    early: bool = False,
    left_out: tuple[str, ...] = ("pooler.",),
    **metadata: Any,
) -> Path:
    """Write the encoder in folder `source` as GGUF `target` and return it.

    `kind` is the type of matrices whose rows are a multiple of its block. `rounded` names a new
    folder that gets the model as the file holds it, in float32 safetensors. `early`: as converters
    of 2024, without labels and with matrices of one row as vectors. `left_out`: beginnings of the
    names of tensors that the file lacks; by default it lacks the dense layer of BERT's head, as the
    converter's files do. `metadata` adds or replaces keys; None removes one.
    """
    config = json.loads((source / "config.json").read_text())
    is_modern = config["model_type"] == "modernbert"
    arch = gguf.MODEL_ARCH.MODERN_BERT if is_modern else gguf.MODEL_ARCH.BERT
    name = gguf.MODEL_ARCH_NAMES[arch]
    keys = _config(config, source, early) | _tokenizer(source, config, early)
    keys = {key.replace("{arch}", name): value for key, value in keys.items()} | metadata
    writer = gguf.GGUFWriter(target, name)
    for key, value in keys.items():
        if isinstance(value, bytes):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    held = {}
    for hf_name, tensor in load_file(source / "model.safetensors").items():
        own = _converted(hf_name)
        if own.startswith(left_out):
            continue
        own = own.replace("pooler.", "classifier.")
        found = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert found is not None, hf_name
        values = tensor.float().numpy()
        skipped = np.zeros_like(values[:0])
        if "position_embeddings" in own and config["model_type"] == "xlm-roberta":
            skipped, values = np.split(values, [config["pad_token_id"] + 1])
        squeezed = early and values.shape[0] == 1 and values.ndim == 2
        stored = _add(writer, found, values[0] if squeezed else values, GGMLQuantizationType[kind])
        stored = np.concatenate([skipped, stored.reshape(values.shape)])
        held[hf_name] = torch.from_numpy(stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if rounded is not None:
        shutil.copytree(source, rounded, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(held, rounded / "model.safetensors", metadata={"format": "pt"})
    return target


def _config(config: dict[str, Any], source: Path, early: bool) -> dict[str, Any]:
    offset = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    keys: dict[str, Any] = {
        "general.name": "tiny",
        "{arch}.block_count": config["num_hidden_layers"],
        "{arch}.context_length": config["max_position_embeddings"] - offset,
        "{arch}.embedding_length": config["hidden_size"],
        "{arch}.feed_forward_length": config["intermediate_size"],
        "{arch}.attention.head_count": config["num_attention_heads"],
        "{arch}.attention.causal": False,
    }
    if config["model_type"] == "modernbert":
        rope = config["rope_parameters"]
        keys |= {
            "{arch}.attention.layer_norm_epsilon": config["norm_eps"],
            "{arch}.attention.layer_norm_rms_epsilon": config["norm_eps"],
            "{arch}.rope.freq_base": rope["full_attention"]["rope_theta"],
            "{arch}.rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
            "{arch}.rope.scaling.type": "none",
            "{arch}.attention.sliding_window": config["local_attention"],
            "{arch}.attention.sliding_window_pattern": 3,
            "{arch}.vocab_size": config["vocab_size"],
            "{arch}.hidden_activation": config["hidden_activation"],
        }
        pooling = config["classifier_pooling"]
        keys["{arch}.classifier.pooling_type"] = None if early else int(POOLING[pooling])
    else:
        keys["{arch}.attention.layer_norm_epsilon"] = config["layer_norm_eps"]
        keys["tokenizer.ggml.token_type_count"] = config["type_vocab_size"]
    if "ForSequenceClassification" in config["architectures"][0] and not early:
        keys["{arch}.classifier.output_labels"] = list(
            config.get("id2label", {0: "LABEL_0"}).values()
        )
    pooling_file = source / "1_Pooling" / "config.json"
    if pooling_file.exists():
        settings = json.loads(pooling_file.read_text())
        (kind,) = (kind for mode, kind in MODES.items() if settings[mode])
        keys["{arch}.pooling_type"] = int(kind)
    return keys


def _converted(hf_name: str) -> str:
    """Return the converter's name of a tensor."""
    name = hf_name
    for prefix in ("bert.", "roberta.", "model."):
        name = name.removeprefix(prefix)
    if name in ("classifier.weight", "classifier.bias"):
        return name.replace("classifier.", "classifier.out_proj.")
    return name


def _tokenizer(source: Path, config: dict[str, Any], early: bool) -> dict[str, Any]:
    document = json.loads((source / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in document["added_tokens"]}
    model = document["model"]
    is_unigram = model["type"] == "Unigram"
    if is_unigram:
        texts = dict(enumerate(text for text, _ in model["vocab"]))
    else:
        texts = {index: text for text, index in model["vocab"].items()}
    texts |= {index: text for text, index in special.items()}
    size = config["vocab_size"]
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    types = [TokenType.NORMAL if i in texts else TokenType.UNUSED for i in range(size)]
    for index in special.values():
        types[index] = TokenType.CONTROL
    keys: dict[str, Any] = {}
    if model["type"] == "WordPiece":
        tokens = [_phantom(text, kind, early) for text, kind in zip(tokens, types, strict=True)]
        keys["tokenizer.ggml.model"] = "bert"
    elif is_unigram:
        types[model["unk_id"]] = TokenType.UNKNOWN
        keys["tokenizer.ggml.model"] = "t5"
        scores = [score for _, score in model["vocab"]]
        keys["tokenizer.ggml.scores"] = [*scores, *[-10_000.0] * (size - len(scores))]
        keys["tokenizer.ggml.add_space_prefix"] = True
        keys["tokenizer.ggml.remove_extra_whitespaces"] = True
        charsmap = (document["normalizer"] or {}).get("precompiled_charsmap")
        if charsmap:
            keys["tokenizer.ggml.precompiled_charsmap"] = base64.b64decode(charsmap)
    else:
        keys["tokenizer.ggml.model"] = "gpt2"
        keys["tokenizer.ggml.pre"] = "modern-bert"
        # The writer leaves out an empty list; a merge into a control token changes nothing.
        keys["tokenizer.ggml.merges"] = [f"{text[:1]} {text[1:]}" for text in special]
    keys["tokenizer.ggml.tokens"] = tokens
    keys["tokenizer.ggml.token_type"] = [int(kind) for kind in types]
    for name, choices in SPECIAL.items():
        for text in choices:
            if text in special:
                keys[f"tokenizer.ggml.{name}_token_id"] = special[text]
    return keys


def _phantom(text: str, kind: TokenType, early: bool) -> str:
    if kind == TokenType.CONTROL or (early and text.startswith("[") and text.endswith("]")):
        return text
    return text[2:] if text.startswith("##") else SPACE + text


def _add(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: GGMLQuantizationType
) -> np.ndarray:
    """Add a tensor and return the values that the file then holds."""
    if values.ndim < 2 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType.F32
    data = gguf.quants.quantize(values, kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    return np.array(gguf.quants.dequantize(data, kind), np.float32)
