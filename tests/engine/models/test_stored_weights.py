"""Weights kept in their stored format and expanded at each use give the same logits as weights
expanded at load."""

from pathlib import Path

import gguf
import pytest
import torch
from builders.paged_runner import PagedRunner, as_raw, read_config, read_tensors
from builders.tiny_models import write_tiny

from pdserve.engine.architectures import parse_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.torch_parts import PLAIN_FORMATS
from pdserve.engine.weights import BLOCKS, RawTensor, as_plain

# Rows consist of whole blocks of 32.
SIZES = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 32}


def quantized(path: Path, format_of: dict[str, str]) -> dict[str, RawTensor]:
    """Return every tensor in stored form: matrices in the format of the first key that their name
    contains, others in F32."""
    stored = {}
    for name, tensor in read_tensors(path).items():
        format = next((f for key, f in format_of.items() if key in name), "F32")
        if tensor.dim() == 1 or format == "F32":
            stored[name] = as_raw(tensor)
            continue
        blocks = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType[format])
        stored[name] = RawTensor({BLOCKS: blocks}, format, tuple(tensor.shape))
    return stored


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_those_of_expanded_weights(
    arch: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path, arch, **SIZES)
    config = parse_config(read_config(path))
    # q, k and v share a product but have different formats.
    stored = quantized(path, {"embed": "Q8_0", "v_proj": "Q5_1", "proj": "Q4_0", "lm_head": "Q4_1"})
    expanded = {name: as_plain(raw, PLAIN_FORMATS[dtype]) for name, raw in stored.items()}
    requests: list[str] = []

    def as_stored(name: str) -> RawTensor:
        requests.append(name)
        return stored[name]

    kv_dtype = str(dtype).removeprefix("torch.")
    args = (dtype, kv_dtype, torch.device("cpu"))
    logits = {}
    for kind, weights in (("stored", as_stored), ("expanded", expanded.__getitem__)):
        runner = PagedRunner(Decoder(config, weights, *args))
        parts = [runner.step({"x": range(3, 24)}), runner.step({"x": [7]})]
        logits[kind] = torch.cat([part["x"] for part in parts])
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(logits["stored"], logits["expanded"], atol=tolerance, rtol=0)
    assert sorted(requests) == sorted(stored), "each tensor must be requested once"
    assert {raw.format for raw in stored.values()} >= {"Q8_0", "Q5_1", "Q4_0"}
