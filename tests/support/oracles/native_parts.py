"""Lists of parts for a native stack, and the expected result of a step: their single operations,
one after the other on one thread.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.kernels import _native as native

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Part = tuple[str, dict[str, Any]]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, BLOCK = 64, 4, 2, 32, 48, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
POSITIONS = 400
CONTEXTS = {threads: native.Context(threads) for threads in (1, 2, 3)}
ONE = CONTEXTS[1]


def values(seed: int, *shape: int, size: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).normal(size=shape) * size).astype(np.float32)


def matrix(seed: int, outputs: int, inputs: int, kind: str = "Q8_0") -> native.Matrix:
    numbers = values(seed, outputs, inputs, size=inputs**-0.5)
    if kind == "FP8":
        codes, scales = np.zeros((outputs, inputs), np.uint8), np.ones((outputs, 1), np.float32)
        return native.Matrix.pack_groups(ONE, kind, codes, "F32", scales.view(np.uint8))
    if kind == "F32":
        return native.Matrix.pack(ONE, kind, numbers.view(np.uint8), outputs, inputs)
    blocks = numbers.reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    quants = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    stored = np.hstack((scales.view(np.uint8), quants.view(np.uint8))).reshape(outputs, -1)
    return native.Matrix.pack(ONE, kind, np.ascontiguousarray(stored), outputs, inputs)


ANGLES = np.arange(POSITIONS)[:, None] * 0.7 ** np.arange(HEAD_DIM // 2)
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)


# --- lists of parts


def norm(seed: int, size: int = HIDDEN) -> Part:
    return "norm", {"weight": values(seed, size) * 0.2 + 1, "eps": 1e-5}


def layer_norm(seed: int, bias: bool = True) -> Part:
    weight, added = values(seed, HIDDEN) * 0.2 + 1, values(seed + 1, HIDDEN)
    return "layer_norm", {"weight": weight, "bias": added if bias else None, "eps": 1e-5}


def linear(seed: int, outputs: int, inputs: int, kind: str = "Q8_0", bias: bool = False) -> Part:
    """Return a linear part with descriptions of two matrices; `made` builds them."""
    half = outputs // 32 * 16
    matrices = [(seed, half, inputs, kind), (seed + 1, outputs - half, inputs, kind)]
    return "linear", {"matrices": matrices, "bias": values(seed, outputs) if bias else None}


MATRICES = ("matrices", "router", "gates", "ups", "downs", "shared")  # fields of parts


def made(parts: list[Part]) -> list[Part]:
    """Return the parts with matrices in place of their descriptions."""
    return [
        (kind, f | {name: [matrix(*m) for m in f[name]] for name in MATRICES if name in f})
        for kind, f in parts
    ]


def rope() -> Part:
    return "rope", {"table": 0, "heads": HEADS + KV_HEADS, "head_dim": HEAD_DIM, "begin": 0}


def attention(group: int = 0, window: int = 0, sinks: bool = False, latent: int = 0) -> Part:
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return "attention", {
        **sizes,
        "scale": HEAD_DIM**-0.5,
        "soft_cap": 20.0 if window else 0.0,
        "window": window,
        "group": group,
        "sinks": values(17, HEADS) if sinks else None,
        "latent": latent,
        "causal": 1,
    }


def head_linear(seed: int, kept: int, kind: str) -> Part:
    """Return a part that multiplies the heads of q: the row length is unchanged."""
    size = HEAD_DIM - kept
    return "head_linear", {
        "matrices": [(seed + n, size, size, kind) for n in range(HEADS)],
        "kept": kept,
    }


def experts(
    seed: int,
    kind: str = "Q8_0",
    shared: bool = False,
    shared_gate: bool = False,
    biases: bool = False,
    activation: str = "silu",
    **routing: Any,
) -> Part:
    """Return a part with six experts, two per row unless `routing` overrides it."""
    count, size = 6, 32
    routers = [(seed, count, HIDDEN, "F32"), (seed + 1, 1, HIDDEN, "F32")]
    wide, narrow = (size, HIDDEN, kind), (HIDDEN, size, kind)
    return "experts", {
        "router": routers[: 1 + shared_gate],
        "bias": values(seed, count) if biases else None,
        "correction": values(seed + 1, count) if biases else None,
        "gates": [(seed + n, *wide) for n in range(count)],
        "ups": [(seed + n + 10, *wide) for n in range(count)],
        "downs": [(seed + n + 20, *narrow) for n in range(count)],
        "gate_up_biases": values(seed, count, 2 * size) if biases else None,
        "down_biases": values(seed, count, HIDDEN) if biases else None,
        "shared": [(seed + 30, *wide), (seed + 31, *wide), (seed + 32, *narrow)] if shared else [],
        "activation": activation,
        **ROUTING,
        **routing,
    }


ROUTING = {
    "top_k": 2,
    "sigmoid": 0,
    "normalized": 1,
    "scale": 1.0,
    "groups": 1,
    "kept_groups": 1,
    "group_best": 1,
}


def reorder(seed: int, size: int) -> Part:
    return "reorder", {"order": np.random.default_rng(seed).permutation(size)}


ADDED = values(11, 40, HIDDEN)  # an embedding that is added to that of the tokens
ADD: Part = ("add", {"held": 0})
REPLACE: Part = ("replace", {})
HOLD: Part = ("hold", {})
ADD_HELD: Part = ("add", {"held": 1})


def plain_layer() -> list[Part]:
    return [
        norm(1),
        linear(2, QKV, HIDDEN),
        rope(),
        attention(),
        linear(3, HIDDEN, HEADS * HEAD_DIM),
        ADD,
        norm(4),
        linear(5, 192, HIDDEN),
        ("gate", {"activation": "silu"}),
        linear(6, HIDDEN, 96),
        ADD,
    ]


@dataclass
class Batch:
    """A step: `new` tokens of each row, after `old` ones; each row has separate blocks."""

    old: list[int]
    new: list[int]
    seed: int = 0
    starts: list[int] = field(init=False)
    kv_lens: list[int] = field(init=False)
    ids: Ids = field(init=False)
    added_ids: Ids = field(init=False)  # rows of ADDED
    positions: Ids = field(init=False)
    table: Ids = field(init=False)
    slots: Ids = field(init=False)

    WIDTH = 16  # blocks of a row

    def __post_init__(self) -> None:
        self.starts = [0, *np.cumsum(self.new).tolist()]
        self.kv_lens = [a + b for a, b in zip(self.old, self.new, strict=True)]
        rng = np.random.default_rng(self.seed)
        self.ids = rng.integers(0, VOCAB, self.starts[-1])
        self.added_ids = rng.integers(0, len(ADDED), self.starts[-1])
        spans = [np.arange(a, a + b) for a, b in zip(self.old, self.new, strict=True)]
        self.positions = np.concatenate(spans)
        rows = len(self.new)
        self.table = np.arange(rows * self.WIDTH).reshape(rows, self.WIDTH)
        self.slots = np.concatenate(
            [row * self.WIDTH * BLOCK + span for row, span in enumerate(spans)]
        )


def pools(lists: list[list[Part]], rows: int) -> list[NDArray[np.uint8]]:
    """Return empty KV memory of each layer."""
    latent = [f["latent"] for parts in lists for kind, f in parts if kind == "attention"]
    sizes = [native.kv_block_bytes("float32", KV_HEADS, BLOCK, HEAD_DIM, n) for n in latent]
    return [np.zeros((rows * Batch.WIDTH, size), np.uint8) for size in sizes]


def embedding() -> native.Matrix:
    return matrix(7, VOCAB, HIDDEN)


def head() -> native.Matrix:
    return matrix(8, VOCAB, HIDDEN)


LAST = norm(9)


def stack_of(context: native.Context, lists: list[list[Part]], added: bool = False) -> native.Stack:
    stack = native.Stack(
        context, hidden=HIDDEN, embed_scale=1.5, logit_scale=1.0, logit_soft_cap=0.0
    )
    stack.set_embedding(embedding())
    if added:
        stack.set_added_embedding(ADDED)
    stack.set_rope(0, COS, SIN)
    for parts in lists:
        stack.add_layer(parts)
    stack.set_head(LAST, head())
    return stack


def run(
    stack: native.Stack,
    batch: Batch,
    outputs: Ids,
    groups: int = 1,
    kv_only: bool = False,
    added_ids: Ids | None = None,
) -> Floats:
    tables, slots = [batch.table] * groups, [batch.slots] * groups
    ids, positions = batch.ids, batch.positions
    return stack.forward(
        ids, positions, batch.starts, batch.kv_lens, tables, slots, outputs, kv_only, added_ids
    )


def product(x: Floats, matrices: list[native.Matrix], bias: Floats | None = None) -> Floats:
    out = np.empty((len(x), sum(m.rows for m in matrices)), np.float32)
    native.linear_into(ONE, x, matrices, out, bias)
    return out


def one_by_one(
    lists: list[list[Part]], kv: list[NDArray[np.uint8]], batch: Batch, added: bool = False
) -> Floats:
    """Return final hidden states of all tokens, by the single operations on a separate thread."""
    stream = embedding().row_values(ONE, batch.ids)
    stream *= np.float32(1.5)
    if added:
        stream += ADDED[batch.added_ids]
    for parts, pool in zip(lists, kv, strict=True):
        x = stream
        held = np.zeros_like(stream)
        for kind, fields in parts:
            if kind == "hold":
                x, held = stream, x
            elif kind == "add":
                x = stream = (stream + held if fields["held"] else stream) + x
            elif kind == "replace":
                stream = x
            else:
                x = operation(kind, fields, x, pool, batch)
    return operation(*LAST, stream, None, batch)


def operation(kind: str, f: dict[str, Any], x: Floats, pool: Any, batch: Batch) -> Floats:
    tokens, out = len(x), np.empty_like(x)
    if kind == "norm":
        native.rms_norm(ONE, x, f["weight"], f["eps"], out)
    elif kind == "layer_norm":
        bias = np.zeros(HIDDEN, np.float32) if f["bias"] is None else f["bias"]
        native.layer_norm(ONE, x, f["weight"], bias, f["eps"], out)
    elif kind == "scale":
        out = x * np.float32(f["factor"])
    elif kind == "activate":
        native.gated(ONE, x, np.ones_like(x), f["activation"], out)
    elif kind == "linear":
        out = product(x, f["matrices"], f["bias"])
    elif kind == "gate":
        gate, up = (np.ascontiguousarray(half) for half in np.split(x, 2, axis=1))
        out = np.empty_like(gate)
        native.gated(ONE, gate, up, f["activation"], out)
    elif kind == "reorder":
        out = np.ascontiguousarray(x[:, f["order"]])
    elif kind == "experts":
        out = mixture(f, x)
    elif kind == "head_linear":
        out, kept = x.copy(), f["kept"]
        for n, one in enumerate(f["matrices"]):
            own = slice(n * HEAD_DIM + kept, (n + 1) * HEAD_DIM)
            out[:, own] = product(np.ascontiguousarray(x[:, own]), [one])
    else:
        heads = x.reshape(tokens, -1, HEAD_DIM).copy()
        if kind == "head_norm":
            flat, size = heads.reshape(tokens, -1), len(f["weight"])
            own = slice(f["begin"], f["begin"] + f["heads"] * size)
            rows = np.ascontiguousarray(flat[:, own]).reshape(-1, size)
            native.rms_norm(ONE, rows.copy(), f["weight"], f["eps"], rows)
            flat[:, own] = rows.reshape(tokens, -1)
        elif kind == "head_layer_norm":
            zeros = np.zeros(HEAD_DIM, np.float32)
            for n, weight in enumerate(f["weight"].reshape(-1, HEAD_DIM)):
                one = np.ascontiguousarray(heads[:, n])
                native.layer_norm(ONE, one.copy(), weight, zeros, f["eps"], one)
                heads[:, n] = one
        elif kind == "rope":
            turned = heads[:, : f["heads"]]
            first, second = np.split(turned.copy(), 2, axis=2)
            cos, sin = COS[batch.positions, None], SIN[batch.positions, None]
            turned[...] = np.concatenate(
                (first * cos - second * sin, second * cos + first * sin), axis=2
            )
        else:
            q, k, v = (
                np.ascontiguousarray(part)
                for part in np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
            )
            latent = f["latent"]
            of_values = None if latent else v
            native.write_kv(ONE, pool, "float32", BLOCK, k, of_values, batch.slots, latent)
            heads = np.empty((tokens, HEADS, latent or HEAD_DIM), np.float32)
            starts, lens = np.array(batch.starts), np.array(batch.kv_lens)
            options = (f["scale"], f["window"], f["soft_cap"])
            native.paged_attention(
                *(ONE, q, pool, "float32", KV_HEADS, BLOCK, batch.table, starts, lens),
                *(*options, heads, f["sinks"], latent),
            )
        out = heads.reshape(tokens, -1)
    return out


def mixture(f: dict[str, Any], x: Floats) -> Floats:
    """Return the experts' output for the rows of x, one after the other."""
    logits = product(x, f["router"][:1], f["bias"])
    chosen, weights = choice(logits, f["correction"], **{name: f[name] for name in ROUTING})
    biases = (f["gate_up_biases"], f["down_biases"])
    out = np.zeros_like(x)
    for row in range(len(x)):
        one = x[row : row + 1]
        for n in np.argsort(chosen[row]):
            e = chosen[row, n]
            three = [f[name][e] for name in ("gates", "ups", "downs")]
            own = [None if bias is None else bias[e] for bias in biases]
            out[row] += weights[row, n] * gated_products(one, three, f["activation"], *own)[0]
    if f["shared"]:
        weight = np.ones((len(x), 1), np.float32)
        if len(f["router"]) == 2:  # a score of one expert is the sigmoid of its logit
            logit = product(x, f["router"][1:])
            weight = choice(logit, None, **ROUTING | {"top_k": 1, "sigmoid": 1, "normalized": 0})[1]
        out += weight * gated_products(x, f["shared"], f["activation"])
    return out


def choice(
    logits: Floats, correction: Floats | None, top_k: int, **routing: Any
) -> tuple[Ids, Floats]:
    chosen = np.empty((len(logits), top_k), np.int64)
    weights = np.empty(chosen.shape, np.float32)
    flags = {name: bool(routing[name]) for name in ("sigmoid", "normalized")}
    native.choose_experts(
        ONE, logits, correction, chosen=chosen, weights=weights, **routing | flags
    )
    return chosen, weights


def gated_products(
    x: Floats,
    matrices: list[native.Matrix],
    activation: str,
    gate_up_bias: Floats | None = None,
    down_bias: Floats | None = None,
) -> Floats:
    both = product(x, matrices[:2], gate_up_bias)
    gate, up = (np.ascontiguousarray(half) for half in np.split(both, 2, axis=1))
    middle = np.empty_like(gate)
    native.gated(ONE, gate, up, activation, middle)
    return product(middle, matrices[2:], down_bias)
