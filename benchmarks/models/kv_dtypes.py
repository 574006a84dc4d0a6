"""The cost of a dtype of keys and values: KL and agreement of the best token with float32 keys and
values, over TOKENS tokens of prose, on real files and on a model with large biases. Needs
benchmarks/cpu and tests/support in PYTHONPATH."""

import json
import tempfile
from pathlib import Path
from typing import Any

from oracles.kv_quality import KvQuality, kv_quality, logits_of, write_biased
from tokenizers import Tokenizer
from weights import gemma_gguf, shipped_gguf

from pdserve.engine.load import open_checkpoint

PROSE = Path(__file__).parents[1] / "text/prose.txt"
TOKENS = 512
DTYPES = ("auto", "float16", "bf16", "int8")


def measure(model: Path, ids: list[int]) -> dict[str, Any]:
    exact = logits_of(model, "float32", ids)
    found: dict[str, KvQuality] = {
        name: kv_quality(exact, logits_of(model, name, ids)) for name in DTYPES
    }
    return {
        "tokens": len(ids),
        **{
            name: {"kl": float(f"{quality.kl:.2g}"), "same_top": round(quality.same_top, 4)}
            for name, quality in found.items()
        },
    }


def prose_ids(model: Path) -> list[int]:
    """TOKENS tokens of prose after the model's first one."""
    text = open_checkpoint(model).text_files()
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    ids: list[int] = tokenizer.encode(PROSE.read_text(), add_special_tokens=False).ids
    bos = [text.bos_id] if text.adds_bos and text.bos_id is not None else []
    return (bos + ids)[:TOKENS]


def main() -> None:
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        biased = write_biased(Path(folder) / "biased")
        parts["k bias of 200"] = measure(biased, list(PROSE.read_bytes()[:TOKENS]))
        for model in (shipped_gguf(), gemma_gguf()):
            parts[model.stem] = measure(model, prose_ids(model))
    print(json.dumps(parts))


if __name__ == "__main__":
    main()
