"""Write tests/engine/weights/golden_mixes.json with llama.cpp: the format that llama-quantize gives
each tensor of some tiny models, for each type. The table has each model's metadata, the shapes of
its tensors, and by type and tensor the format, "0:Q6_K 2:Q4_K" with the first layer of each. {n} is
the number of a layer, - no tensor.

    .venv/bin/python tools/tables/golden_mixes.py build/peers/llama.cpp/build/bin/llama-quantize

It needs torch and transformers, and 300 MB of temporary files.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))

from builders.tiny_models import write_tiny
from builders.write_gguf import write_gguf

from pdserve.engine.checkpoints.gguf.reader import GgufReader
from pdserve.engine.checkpoints.gguf.writer import MIXES
from pdserve.engine.weights import TYPES

TABLE = Path(__file__).parents[2] / "tests/engine/weights/golden_mixes.json"
LINE = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) .*type = +(\w+), .*?(?:\((\w+)\))?$")
LAYER = re.compile(r"^blk\.(\d+)\.")
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 10,
    "max_position_embeddings": 64,
}
EXPERTS = {**WIDE, "moe_intermediate_size": 256, "num_experts_per_tok": 2}


class Tiny(NamedTuple):
    """A tiny model whose rows fit every type."""

    arch: str
    sizes: dict[str, Any]


MODELS = {
    "llama": Tiny("llama", WIDE),
    "llama, 2 kv heads": Tiny("llama", {**WIDE, "num_key_value_heads": 2}),
    "llama, tied": Tiny("llama", {**WIDE, "tie_word_embeddings": True, "num_hidden_layers": 33}),
    "llama, 80 layers": Tiny("llama", {**WIDE, "num_hidden_layers": 80}),
    "phi3": Tiny("phi3", WIDE),
    "phi3, 4 kv heads": Tiny("phi3", {**WIDE, "num_key_value_heads": 4}),
    "qwen3_moe, 4 experts": Tiny("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    "qwen3_moe, 8 experts": Tiny("qwen3_moe", {**EXPERTS, "num_experts": 8}),
    "deepseek_v3": Tiny(
        "deepseek_v3",
        {
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 10,
            "q_lora_rank": 256,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 256,
            "v_head_dim": 256,
            "moe_intermediate_size": 256,
        },
    ),
}


def described(model: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Metadata and shapes of a GGUF file."""
    reader = GgufReader(model)
    arch = reader.metadata["general.architecture"]
    kept = {key: v for key, v in reader.metadata.items() if key.startswith(f"{arch}.")}
    shapes = {_everywhere(name): [*info.shape] for name, info in reader.tensors.items()}
    return {"general.architecture": arch, **kept}, shapes


def in_runs(formats: dict[str, str]) -> dict[str, str]:
    """Merge consecutive layers with the same format."""
    by_kind: dict[str, dict[int, str]] = {}
    for name, format in formats.items():
        layer = int(LAYER.match(name)[1]) if LAYER.match(name) else 0
        by_kind.setdefault(_everywhere(name), {})[layer] = format
    num_layers = 1 + max(layer for of in by_kind.values() for layer in of)
    return {name: _runs(of, num_layers) for name, of in sorted(by_kind.items())}


def _runs(of: dict[int, str], num_layers: int) -> str:
    every = [of.get(n, "-") for n in range(num_layers)]
    begins = [n for n in range(num_layers) if n == 0 or every[n] != every[n - 1]]
    return " ".join(f"{n}:{every[n]}" for n in begins)


def _everywhere(name: str) -> str:
    return LAYER.sub("blk.{n}.", name)


def formats_of(quantize: Path, model: Path, type: str) -> dict[str, str]:
    """The format of each tensor, as llama-quantize reports it in advance."""
    program = [str(quantize), "--dry-run", str(model), MIXES.get(TYPES[type], TYPES[type])]
    said = subprocess.run(program, capture_output=True, text=True, check=True)
    found = {}
    for line in (said.stdout + said.stderr).splitlines():
        if match := LINE.match(line.strip()):
            name, before, after = match.groups()
            found[name] = (after or before).upper()
    return found


def main() -> None:
    quantize = Path(sys.argv[1]).resolve()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (arch, sizes) in MODELS.items():
            path = Path(folder) / name.replace(" ", "")
            gguf = write_gguf(write_tiny(path, arch, **sizes), path / "model.gguf")
            formats = {type: in_runs(formats_of(quantize, gguf, type)) for type in TYPES}
            metadata, shapes = described(gguf)
            table[name] = {"metadata": metadata, "shapes": shapes, "formats": formats}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
