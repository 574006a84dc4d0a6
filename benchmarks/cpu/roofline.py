"""The roofline: the minimum bytes and operations of a work, over the limits of the machine.

Counted from a GGUF file: every matrix is read once per pass, as stored, with its multiply-adds for
each token; the head only for sampled tokens; keys and values as the engine stores them. Limits are
measured by limits.cpp. Overlap is assumed to be perfect, so that no work can be faster.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from peers import PEERS
from table import Work

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the cores together."""

    read_bytes_s: float
    ops_s: float  # with the product of the weights' type

    def seconds(self, read_bytes: float, ops: float) -> float:
        return max(read_bytes / self.read_bytes_s, ops / self.ops_s)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The bytes that a model's products read and the operations they need."""

    body_bytes: int  # matrices of the layers
    body_values: int
    head_bytes: int
    head_values: int
    kv_bytes: float  # per token, all layers
    attention_width: int  # query heads * head_dim, over all layers

    def prefill_s(self, limits: Limits, batch: int, prompt: int) -> float:
        tokens = batch * prompt
        pairs = batch * prompt * (prompt + 1) // 2  # causal
        ops = 2 * (self.body_values * tokens + self.head_values * batch)
        ops += 4 * pairs * self.attention_width
        return limits.seconds(self.body_bytes + self.head_bytes + tokens * self.kv_bytes, ops)

    def decode_step_s(self, limits: Limits, batch: int, context: float) -> float:
        ops = 2 * (self.body_values + self.head_values) * batch
        ops += int(4 * batch * context * self.attention_width)
        read = self.body_bytes + self.head_bytes + batch * context * self.kv_bytes
        return limits.seconds(read, ops)

    def tokens_per_s(self, limits: Limits, work: Work) -> float:
        """The upper limit of the work's figure."""
        if work.phase == "prefill":
            return work.batch * work.prompt / self.prefill_s(limits, work.batch, work.prompt)
        context = work.prompt + work.new / 2
        return work.batch / self.decode_step_s(limits, work.batch, context)


def gguf_cost(path: Path, kv_bytes: float) -> ModelCost:
    """The cost of a GGUF file; the head is the embedding table if the file has no other."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    matrices = {t.name: t for t in reader.tensors if len(t.shape) > 1}
    embedding = matrices.pop("token_embd.weight")
    head = matrices.pop("output.weight", embedding)
    wide = sum(int(t.shape[1]) for name, t in matrices.items() if name.endswith("attn_q.weight"))
    return ModelCost(
        body_bytes=sum(int(t.n_bytes) for t in matrices.values()),
        body_values=sum(int(t.n_elements) for t in matrices.values()),
        head_bytes=int(head.n_bytes),
        head_values=int(head.n_elements),
        kv_bytes=kv_bytes,
        attention_width=wide,
    )


def as_bf16(cost: ModelCost) -> ModelCost:
    """The same model with two bytes per value."""
    return ModelCost(
        cost.body_values * 2, cost.body_values, cost.head_values * 2, cost.head_values,
        cost.kv_bytes, cost.attention_width,
    )  # fmt: skip


def measured(threads: int) -> dict[str, float]:
    """Figures of limits.cpp, which is built if needed."""
    program, source = PEERS / "limits", HERE / "limits.cpp"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        PEERS.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++17", "-O3", "-march=native", "-w", "-pthread"]
        subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
    words = [str(program), str(threads)]
    figures = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert isinstance(figures, dict)
    return figures
