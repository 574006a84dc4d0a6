"""Models of random weights in the shapes of known ones: as decoders, or as a folder to serve.

Their weights are slices of one pool of random numbers, the only numbers generated.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from builders.byte_tokenizer import VOCAB_SIZE, write_tokenizer

from pdserve.engine.architectures import find_spec
from pdserve.engine.models import EMBEDDING, ModelConfig, tensor_shapes
from pdserve.engine.models.cuda import CudaDecoder, CudaRecorder
from pdserve.engine.models.cuda.decoder import Recorder
from pdserve.engine.weights import BLOCKS, VALUES, RawTensor

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
QWEN3_MOE: dict[str, Any] = QWEN3_0_6B | {  # four layers of Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_SMALL = {
    "vocab_size": VOCAB_SIZE + 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
FAKE_QWEN3 = QWEN3_0_6B | _SMALL
FAKE_MOE = QWEN3_MOE | _SMALL | {"num_experts": 5, "num_experts_per_tok": 2}
FAKE_MOE |= {"moe_intermediate_size": 32}
# Blocks of Q4_K have 256 columns.
FAKE_LLAMA = LLAMA_8B | _SMALL | {"hidden_size": 256, "intermediate_size": 256}
POOL_VALUES = 1 << 26
Q4_K_BYTES = 144  # per 256 values


def config_of(hf_config: dict[str, Any]) -> ModelConfig:
    return find_spec(hf_config).parse(hf_config)


class RandomWeights:
    """All tensors of a model: the same name always gets the same values. Matrices are of `format`,
    BF16 or Q4_K; norms and the embedding are plain."""

    def __init__(self, config: ModelConfig, format: str = "BF16", seed: int = 0) -> None:
        self.shapes = tensor_shapes(config)
        self._format = format
        largest = max(rows * cols for rows, *rest in self.shapes.values() for cols in rest)
        rng = np.random.default_rng(seed)
        values = rng.standard_normal(min(POOL_VALUES, largest), dtype=np.float32)
        values *= config.hidden_size**-0.5  # keeps the scale of sums
        self._plain = _bf16(values)
        self._blocks = rng.integers(0, 256, (len(values) // 256, Q4_K_BYTES), np.uint8)
        scales = np.array([values.std() / 150, values.std() / 20], np.float16)  # d and dmin
        self._blocks[:, :4] = scales.view(np.uint8)

    def __call__(self, name: str) -> RawTensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            ones = np.ones(shape, np.float32) if name.endswith("norm.weight") else np.zeros(shape)
            return RawTensor({VALUES: _bf16(ones.astype(np.float32))}, "BF16", shape)
        rows, cols = shape
        if self._format == "Q4_K" and name != EMBEDDING:
            blocks = self._piece(self._blocks, rows * cols // 256, name)
            return RawTensor({BLOCKS: blocks.reshape(rows, -1)}, "Q4_K", shape)
        values = self._piece(self._plain, rows * cols, name).reshape(shape)
        return RawTensor({VALUES: values}, "BF16", shape)

    def _piece(self, pool: Any, count: int, name: str) -> Any:
        """This many items, from an offset that depends on the name: a view if the pool is long
        enough."""
        at = zlib.crc32(name.encode()) % max(1, len(pool) - count + 1)
        if count <= len(pool):
            return pool[at : at + count]
        return np.resize(pool, (count, *pool.shape[1:]))


def _bf16(values: Any) -> Any:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def random_decoder(
    hf_config: dict[str, Any],
    device: str,
    format: str = "BF16",
    stream: "torch.cuda.Stream | None" = None,
) -> CudaDecoder:
    """A decoder on the CUDA kernels, in bfloat16."""
    config = config_of(hf_config)
    weights = RandomWeights(config, format)
    return CudaDecoder(
        config, weights, torch.bfloat16, "bfloat16", torch.device(device), stream=stream
    )


def make_recorder(device: str) -> Recorder:
    """A recorder of the thread's current stream; on the fake device, one that launches again."""
    if device != "cpu":
        return CudaRecorder(torch.cuda.current_stream())
    from builders.interpreted_engine import ReplayRecorder

    return ReplayRecorder()


def step_bytes(decoder: CudaDecoder, format: str = "BF16") -> int:
    """Bytes of weights that a decode step reads: all matrices except an embedding that is not the
    head."""
    config = decoder.config
    values = 0
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2 and (name != EMBEDDING or config.tied_head):
            values += shape[0] * shape[1]
    return values * Q4_K_BYTES // 256 if format == "Q4_K" else 2 * values


def token_bytes(decoder: CudaDecoder) -> int:
    """Bytes of the keys and values of one token, over all layers."""
    return sum(group.block_bytes(16) * len(group.layers) // 16 for group in decoder.kv_groups)


def write_checkpoint(folder: Path, hf_config: dict[str, Any]) -> Path:
    """Write a Hugging Face folder with a byte tokenizer and the weights of `random_decoder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = RandomWeights(config_of(hf_config))
    header: dict[str, Any] = {}
    at = 0
    for name, shape in weights.shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in weights.shapes:
            weights(name).parts[VALUES].tofile(file)
    (folder / "config.json").write_text(json.dumps(hf_config | {"torch_dtype": "bfloat16"}))
    write_tokenizer(folder, hf_config["vocab_size"])
    return folder
