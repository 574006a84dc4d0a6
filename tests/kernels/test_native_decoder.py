"""A stack runs any list of parts bit for bit as its operations one after the other, and refuses
lists that cannot be run by the name of the part.

Over 400 lines: lists that run and lists that are refused are made by the same functions.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    """Of two matrices; `made` makes them."""
    half = outputs // 32 * 16
    matrices = [(seed, half, inputs, kind), (seed + 1, outputs - half, inputs, kind)]
    return "linear", {"matrices": matrices, "bias": values(seed, outputs) if bias else None}


def made(parts: list[Part]) -> list[Part]:
    """The parts with matrices where there was how to make them."""
    return [
        (kind, f | {"matrices": [matrix(*m) for m in f["matrices"]]} if "matrices" in f else f)
        for kind, f in parts
    ]


def rope() -> Part:
    return "rope", {"table": 0, "heads": HEADS + KV_HEADS, "head_dim": HEAD_DIM, "begin": 0}


def attention(group: int = 0, window: int = 0, sinks: bool = False) -> Part:
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return "attention", {
        **sizes,
        "scale": HEAD_DIM**-0.5,
        "soft_cap": 20.0 if group else 0.0,
        "window": window,
        "group": group,
        "sinks": values(17, HEADS) if sinks else None,
        "latent": 0,
    }


def head_linear(seed: int, kept: int, kind: str) -> Part:
    """Of the heads of q: a row is as long as before."""
    size = HEAD_DIM - kept
    return "head_linear", {
        "matrices": [(seed + n, size, size, kind) for n in range(HEADS)],
        "kept": kept,
    }


ADD: Part = ("add", {"held": 0})
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


@st.composite
def layers(draw: st.DrawFn) -> list[Part]:
    """Attention and up to two feed-forwards in any order, with norms and biases here and there."""
    seed, kind = draw(st.integers(0, 1000)), draw(st.sampled_from(["Q8_0", "F32"]))
    some = st.booleans()
    windowed, for_heads = draw(some), draw(some) and draw(some)

    def around(inside: list[Part]) -> list[Part]:
        kinds = st.sampled_from([norm, layer_norm])
        before = [draw(kinds)(seed + 1)] if draw(some) else []
        after = [draw(kinds)(seed + 2)] if draw(some) else []
        scaled: list[Part] = [("scale", {"factor": 0.3})] if draw(some) else []
        return [*before, *inside, *after, *scaled, ADD]

    def head_norm(first: int, heads: int, of_heads: bool) -> Part:
        """Of each head, or of all heads as one."""
        weight = values(seed + first, HEAD_DIM if of_heads else heads * HEAD_DIM)
        where = {"begin": first * HEAD_DIM, "heads": heads if of_heads else 1}
        return "head_norm", {"weight": weight, "eps": 1e-6, **where}

    def head_norms() -> list[Part]:
        of_heads = draw(some)
        return [head_norm(0, HEADS, of_heads), head_norm(HEADS, KV_HEADS, of_heads)]

    attend = around(
        [
            linear(seed + 3, QKV, HIDDEN, kind, draw(some)),
            *(head_norms() if draw(some) else []),
            *([rope()] if draw(some) else []),
            # What is kept is the beginning of a head; behind the heads k and v stay.
            *([head_linear(seed, 0 if kind == "Q8_0" else 5, kind)] if for_heads else []),
            attention(int(windowed), 40 if windowed else 0, draw(some)),
            *([head_linear(seed, 0, kind)] if for_heads else []),
            linear(seed + 4, HIDDEN, HEADS * HEAD_DIM, kind, draw(some)),
        ]
    )
    size, gated = draw(st.sampled_from([32, 96])), draw(some)
    activation = {"activation": draw(st.sampled_from(["silu", "gelu", "gelu_tanh"]))}
    feed = around(
        [
            linear(seed + 5, 2 * size if gated else size, HIDDEN, kind),
            ("gate" if gated else "activate", activation),
            linear(seed + 6, HIDDEN, size, kind, draw(some)),
        ]
    )
    if draw(some):  # both on the stream as it was
        return [*attend[:-1], HOLD, *feed[:-1], ADD_HELD]
    pieces = draw(st.permutations([attend, feed][: 1 + draw(some)]))
    return [part for piece in pieces for part in piece]


# --- both ways to run them


@dataclass
class Batch:
    """A step: `new` tokens of each row, behind `old` ones; a row has blocks of its own."""

    old: list[int]
    new: list[int]
    seed: int = 0
    starts: list[int] = field(init=False)
    kv_lens: list[int] = field(init=False)
    ids: Ids = field(init=False)
    positions: Ids = field(init=False)
    table: Ids = field(init=False)
    slots: Ids = field(init=False)

    WIDTH = 16  # blocks of a row

    def __post_init__(self) -> None:
        self.starts = [0, *np.cumsum(self.new).tolist()]
        self.kv_lens = [a + b for a, b in zip(self.old, self.new, strict=True)]
        rng = np.random.default_rng(self.seed)
        self.ids = rng.integers(0, VOCAB, self.starts[-1])
        spans = [np.arange(a, a + b) for a, b in zip(self.old, self.new, strict=True)]
        self.positions = np.concatenate(spans)
        rows = len(self.new)
        self.table = np.arange(rows * self.WIDTH).reshape(rows, self.WIDTH)
        self.slots = np.concatenate(
            [row * self.WIDTH * BLOCK + span for row, span in enumerate(spans)]
        )


def pools(count: int, rows: int) -> list[NDArray[np.uint8]]:
    size = native.kv_block_bytes("float32", KV_HEADS, BLOCK, HEAD_DIM)
    return [np.zeros((rows * Batch.WIDTH, size), np.uint8) for _ in range(count)]


def embedding() -> native.Matrix:
    return matrix(7, VOCAB, HIDDEN)


def head() -> native.Matrix:
    return matrix(8, VOCAB, HIDDEN)


LAST = norm(9)


def stack_of(context: native.Context, lists: list[list[Part]]) -> native.Stack:
    stack = native.Stack(
        context, hidden=HIDDEN, embed_scale=1.5, logit_scale=1.0, logit_soft_cap=0.0
    )
    stack.set_embedding(embedding())
    stack.set_rope(0, COS, SIN)
    for parts in lists:
        stack.add_layer(parts)
    stack.set_head(LAST, head())
    return stack


def run(
    stack: native.Stack, batch: Batch, outputs: Ids, groups: int = 1, kv_only: bool = False
) -> Floats:
    tables, slots = [batch.table] * groups, [batch.slots] * groups
    ids, positions = batch.ids, batch.positions
    return stack.forward(
        ids, positions, batch.starts, batch.kv_lens, tables, slots, outputs, kv_only
    )


def product(x: Floats, matrices: list[native.Matrix], bias: Floats | None = None) -> Floats:
    out = np.empty((len(x), sum(m.rows for m in matrices)), np.float32)
    native.linear_into(ONE, x, matrices, out, bias)
    return out


def one_by_one(lists: list[list[Part]], kv: list[NDArray[np.uint8]], batch: Batch) -> Floats:
    """Final hidden states of all tokens, by the single operations on a thread of their own."""
    stream = embedding().row_values(ONE, batch.ids)
    stream *= np.float32(1.5)
    for parts, pool in zip(lists, kv, strict=True):
        x = stream
        held = np.zeros_like(stream)
        for kind, fields in parts:
            if kind == "hold":
                x, held = stream, x
            elif kind == "add":
                x = stream = (stream + held if fields["held"] else stream) + x
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
            native.write_kv(ONE, pool, "float32", BLOCK, k, v, batch.slots)
            heads, starts, lens = np.empty_like(q), np.array(batch.starts), np.array(batch.kv_lens)
            options = (f["scale"], f["window"], f["soft_cap"])
            native.paged_attention(
                *(ONE, q, pool, "float32", KV_HEADS, BLOCK, batch.table, starts, lens),
                *(*options, heads, f["sinks"]),
            )
        out = heads.reshape(tokens, -1)
    return out


@given(st.lists(layers(), min_size=1, max_size=2), st.sampled_from(list(CONTEXTS)), st.data())
@settings(max_examples=40, deadline=None)
def test_a_list_is_its_operations(
    drawn: list[list[Part]], threads: int, data: st.DataObject
) -> None:
    """In chunks and then in decode steps of few and of many rows, each thread with rows of its own
    or all together; of the tokens only some are wanted, in any order.
    """
    lists = [made(parts) for parts in (plain_layer(), *drawn)]
    rows = data.draw(st.sampled_from([1, 3, 33, 50]))
    lens = data.draw(st.lists(st.integers(1, 120 // rows + 5), min_size=rows, max_size=rows))
    stack = stack_of(CONTEXTS[threads], lists)
    own, other = pools(len(lists), rows), pools(len(lists), rows)
    stack.set_kv(own, "float32", BLOCK)
    old, groups = [0] * rows, 1 + max(f.get("group", 0) for parts in lists for _, f in parts)
    for step, new in enumerate((lens, [1] * rows, [1] * rows)):
        batch = Batch(old, new, step)
        count = batch.starts[-1]
        outputs = np.random.default_rng(step).permutation(count)[: data.draw(st.integers(1, count))]
        want = one_by_one(lists, other, batch)[outputs]
        assert run(stack, batch, outputs, groups).tobytes() == want.tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(own, other, strict=True))
        parts_of = {kind for parts in lists for kind, _ in parts}
        alone = step and threads > 1 and rows >= 16 * threads and "head_linear" not in parts_of
        assert stack.shares == (threads if alone else 0)
        old = batch.kv_lens


def test_of_the_last_layer_only_keys_and_values_are_computed_if_nothing_is_wanted() -> None:
    lists = [made(plain_layer()), made(plain_layer())]
    stack, own, other = stack_of(CONTEXTS[2], lists), pools(2, 1), pools(2, 1)
    stack.set_kv(own, "float32", BLOCK)
    batch = Batch([0], [70])
    assert run(stack, batch, np.array([69]), kv_only=True).shape == (0, HIDDEN)
    one_by_one(lists, other, batch)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(own, other, strict=True))


def test_logits_are_the_product_with_the_head() -> None:
    stack, hidden = stack_of(CONTEXTS[2], [made(plain_layer())]), values(1, 5, HIDDEN)
    out = np.empty((5, VOCAB), np.float32)
    stack.logits(hidden, out)
    assert out.tobytes() == product(hidden, [head()]).tobytes()


# --- lists that cannot be run


def changed(n: int, *parts: Part) -> list[Part]:
    """A plain layer with other parts in the place of part n."""
    layer = plain_layer()
    return [*layer[:n], *parts, *layer[n + 1 :]]


def without(n: int, name: str) -> list[Part]:
    kind, fields = plain_layer()[n]
    return changed(n, (kind, {key: value for key, value in fields.items() if key != name}))


def fields(n: int, **other: Any) -> list[Part]:
    kind, before = plain_layer()[n]
    return changed(n, (kind, before | other))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "layer 1: it has no parts"),
        (
            changed(0, ("nrom", {})),
            r"part 0 \(nrom\): no such kind of part; known: norm, layer_norm, ",
        ),
        (changed(0, norm(1, 60)), r"part 0 \(norm\): weight of 60, not 64"),
        (without(0, "eps"), r"part 0 \(norm\): eps is missing"),
        (fields(0, wieght=1), r"part 0 \(norm\): it has no field wieght; it has weight, eps"),
        (fields(0, eps=float("nan")), r"part 0 \(norm\): eps must be finite"),
        (fields(0, weight=[1.0]), r"part 0 \(norm\): weight must be float32 \[n\]"),
        (changed(1, linear(2, QKV, 96)), r"part 1 \(linear\): inputs of 96, not 64"),
        (fields(1, matrices=[]), r"part 1 \(linear\): it takes 1 to 8 matrices"),
        (fields(1, bias=values(1, 9)), r"part 1 \(linear\): bias of 9, not 256"),
        (changed(1), r"part 1 \(rope\): it reads up to value 192, but a row has 64"),
        (fields(2, begin=65), r"part 2 \(rope\): it reads up to value 257, but a row has 256"),
        (plain_layer()[3:], r"part 0 \(attention\): heads of q, k and v of 256, not 64"),
        (changed(0, rope()), r"part 0 \(rope\): it must not take the residual stream itself"),
        (fields(2, table=1), r"part 2 \(rope\): table must be 0 to 0"),
        (fields(2, head_dim=16), r"part 2 \(rope\): its table rotates more dims than a head has"),
        (fields(3, kv_heads=3), r"part 3 \(attention\): heads must be a multiple of kv_heads"),
        (fields(3, kv_heads=0), r"part 3 \(attention\): kv_heads must be 1 to 65536"),
        (fields(3, sinks=values(1, 3)), r"part 3 \(attention\): sinks of 3, not 4"),
        (fields(3, window=8), r"layer 1 \(attention\): other heads or another window"),
        (fields(3, latent=33), r"part 3 \(attention\): latent must be 0 to 32"),
        (fields(3, latent=32), r"part 3 \(attention\): heads of q, k and v of 192, not 256"),
        (
            changed(1, ("head_linear", {"matrices": [], "kept": 0})),
            r"part 1 \(head_linear\): it has no matrices",
        ),
        (
            changed(
                1, ("head_linear", {"matrices": [(1, 8, 8, "F32"), (1, 8, 9, "F32")], "kept": 0})
            ),
            r"part 1 \(head_linear\): the matrices must have one size",
        ),
        (
            changed(1, head_linear(1, 0, "F32")),
            r"part 1 \(head_linear\): its heads have 128 values, a row 64",
        ),
        (changed(3, linear(2, 128, QKV)), "layer 1: it has no attention"),
        ([*plain_layer(), *plain_layer()], r"part 14 \(attention\): a layer has one attention"),
        (changed(5, ADD, ADD), r"part 6 \(add\): it must not take the residual stream itself"),
        (changed(4), r"part 4 \(add\): a row has 128 values, the stream 64"),
        (fields(8, activation="relu"), r"part 8 \(gate\): activation must be silu"),
        (changed(7, linear(5, 97, HIDDEN)), r"part 8 \(gate\): a row of 97 values has no halves"),
        (changed(10, HOLD), r"part 10 \(hold\): a layer must end with add"),
        (changed(10, HOLD, norm(1), HOLD), r"part 12 \(hold\): it holds one row at a time"),
        (changed(10, HOLD, norm(1), ADD), r"part 12 \(add\): it must add what is held"),
        (
            [norm(1), HOLD, *plain_layer()[:4]],
            r"part 5 \(attention\): it comes before what is held",
        ),
        (changed(10, ADD_HELD), r"part 10 \(add\): nothing is held"),
        (changed(10), r"part 9 \(linear\): a layer must end with add"),
    ],
)
def test_a_list_that_cannot_be_run_is_refused(parts: list[Part], message: str) -> None:
    stack = native.Stack(ONE, hidden=HIDDEN, embed_scale=1.0, logit_scale=1.0, logit_soft_cap=0.0)
    stack.set_rope(0, COS, SIN)
    stack.add_layer(made(plain_layer()))
    with pytest.raises(ValueError, match=message):
        stack.add_layer(made(parts))
    stack.add_layer(made(plain_layer()))  # nothing of the refused one is left


def test_a_stack_is_complete_before_its_first_step() -> None:
    stack = native.Stack(ONE, hidden=HIDDEN, embed_scale=1.0, logit_scale=1.0, logit_soft_cap=0.0)
    with pytest.raises(ValueError, match="after the layers"):
        stack.set_head(LAST, head())
    stack.set_rope(0, COS, SIN)
    stack.add_layer(made(plain_layer()))
    batch = Batch([0], [3])
    with pytest.raises(ValueError, match="head is not set"):
        run(stack, batch, np.array([2]))
    with pytest.raises(ValueError, match="the last norm: weight of 9, not 64"):
        stack.set_head(norm(1, 9), head())
    with pytest.raises(ValueError, match="the head: inputs of 96, not 64"):
        stack.set_head(LAST, matrix(1, VOCAB, 96))
    stack.set_head(LAST, head())
    with pytest.raises(ValueError, match="layers come before the head"):
        stack.add_layer(made(plain_layer()))
    with pytest.raises(ValueError, match="embedding is not set"):
        run(stack, batch, np.array([2]))
    stack.set_embedding(embedding())
    with pytest.raises(ValueError, match="no KV cache is set"):
        run(stack, batch, np.array([2]))
