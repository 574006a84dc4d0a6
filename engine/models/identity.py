"""Names the computation that produced a KV cache, so that keys and values of different weights or
numerics are never mixed."""

import hashlib
import json
import struct
from dataclasses import asdict, replace
from typing import Any

from pdserve.engine.checkpoints import CardData
from pdserve.engine.kv import KvIdentity
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.rope import for_context


def numerics_id(kernels: str, kv_dtype: str, weights: str) -> str:
    """Return an id of how a model computes: its kernels (with version, instruction set, compute
    dtype), KV dtype, tensor-parallel size and weight expansion.

    Engines with the same id compute the same floats from the same inputs, as far as the kernels
    promise it.
    """
    return f"{kernels}/{kv_dtype}/tp1/{weights}"


def configuration_digest(config: ModelConfig, pooling: str = "") -> str:
    """Return the hex digest of a ModelConfig, and of an embedding model's pooling. The context
    length counts only where rope depends on it.

    Floats count as float32, since GGUF stores a config.json's decimals as float32.
    """
    layers = [
        replace(layer, rope=layer.rope and for_context(layer.rope, config.context_len))
        for layer in config.layers
    ]
    content = asdict(replace(config, layers=tuple(layers), context_len=0))
    for name in ("encoder", "classifier", "positions"):
        if content[name] is None:
            del content[name]  # as in releases without them
    if pooling:
        content["pooling"] = pooling
    text = json.dumps(_as_float32(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_float32(value: Any) -> Any:
    match value:
        case float():
            return struct.pack("<f", value).hex()
        case dict():
            return {key: _as_float32(item) for key, item in value.items()}
        case list() | tuple():
            return [_as_float32(item) for item in value]
        case _:
            return value


def kv_identity(card: CardData, kv_dtype: str, numerics: str) -> KvIdentity:
    """Return the identity of a model's KV cache. Digests are equal only if the caches may share
    keys and values, so an override of the config that changes them must be part of the digest."""
    parts = [card.weights_digest, card.quantization, card.config_digest, kv_dtype, numerics]
    return KvIdentity(
        digest=hashlib.sha256(json.dumps(["pdserve kv", *parts]).encode()).digest()[:16],
        weights=card.weights_digest,
        quantization=card.quantization,
        configuration=card.config_digest,
        tokenizer=hashlib.sha256(card.tokenizer_json).hexdigest(),
        kv_dtype=kv_dtype,
        numerics=numerics,
    )
