"""A stack runs any list of parts with the same bits as the separate operations in sequence."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.native_parts import (
    ADD,
    ADD_HELD,
    BLOCK,
    CONTEXTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    HOLD,
    KV_HEADS,
    QKV,
    REPLACE,
    VOCAB,
    Batch,
    Part,
    attention,
    experts,
    head,
    head_linear,
    layer_norm,
    linear,
    made,
    norm,
    one_by_one,
    plain_layer,
    pools,
    product,
    reorder,
    rope,
    run,
    stack_of,
    values,
)

ROUTINGS = (
    {},
    {"top_k": 3, "sigmoid": 1, "scale": 2.5},
    {"groups": 3, "kept_groups": 2, "group_best": 2},
    {"top_k": 6, "normalized": 0},
)


@st.composite
def layers(draw: st.DrawFn) -> list[Part]:
    """Draw attention and a feed-forward or mixture of experts in either order, with optional norms
    and biases."""
    seed, kind = draw(st.integers(0, 1000)), draw(st.sampled_from(["Q8_0", "F32"]))
    some = st.booleans()
    windowed, for_heads = draw(some), draw(some) and draw(some)
    latent = draw(st.sampled_from([0, 0, 20]))
    values_dim = latent or HEAD_DIM
    qkv = (HEADS + KV_HEADS) * HEAD_DIM if latent else QKV

    def around(inside: list[Part]) -> list[Part]:
        kinds = st.sampled_from([norm, layer_norm])
        before = [draw(kinds)(seed + 1)] if draw(some) else []
        after = [draw(kinds)(seed + 2)] if draw(some) else []
        scaled: list[Part] = [("scale", {"factor": 0.3})] if draw(some) else []
        return [*before, *inside, *after, *scaled, ADD]

    def head_norm(first: int, heads: int, of_heads: bool) -> Part:
        """Return a norm over each head, or over all heads together."""
        weight = values(seed + first, HEAD_DIM if of_heads else heads * HEAD_DIM)
        where = {"begin": first * HEAD_DIM, "heads": heads if of_heads else 1}
        return "head_norm", {"weight": weight, "eps": 1e-6, **where}

    def head_norms() -> list[Part]:
        if draw(some):
            weight = values(seed, (HEADS + KV_HEADS) * HEAD_DIM)
            fields = {"weight": weight, "eps": 1e-6, "heads": HEADS + KV_HEADS}
            return [("head_layer_norm", fields)]
        of_heads = draw(some)
        return [head_norm(0, HEADS, of_heads), head_norm(HEADS, KV_HEADS, of_heads)]

    attend = around(
        [
            *([reorder(seed, HIDDEN)] if draw(some) else []),
            linear(seed + 3, qkv, HIDDEN, kind, draw(some)),
            *(head_norms() if draw(some) else []),
            *([rope()] if draw(some) else []),
            # The first columns of each head are kept; k and v after the heads are unchanged.
            *([head_linear(seed, 0 if kind == "Q8_0" else 5, kind)] if for_heads else []),
            attention(0, 40 if windowed else 0, draw(some), latent),
            *([head_linear(seed, 0, kind)] if for_heads and not latent else []),
            linear(seed + 4, HIDDEN, HEADS * values_dim, "F32" if latent else kind, draw(some)),
        ]
    )
    size, gated = draw(st.sampled_from([32, 96])), draw(some)
    activation = {"activation": draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2"]))}
    dense: list[Part] = [
        linear(seed + 5, 2 * size if gated else size, HIDDEN, kind),
        ("gate" if gated else "activate", activation),
        *([reorder(seed + 1, size)] if draw(some) else []),
        linear(seed + 6, HIDDEN, size, kind, draw(some)),
    ]
    shared, biases = draw(some), draw(some)
    mixture = experts(
        seed,
        kind,
        shared,
        shared and draw(some),
        biases,
        draw(st.sampled_from(["silu", "swiglu_oai"])),
        **draw(st.sampled_from(ROUTINGS)),
    )
    feed = around([mixture] if draw(some) else dense)
    if draw(some):  # both read the unchanged stream
        return [*attend[:-1], HOLD, *feed[:-1], ADD_HELD]
    pieces = draw(st.permutations([attend, feed][: 1 + draw(some)]))
    replaced = [layer_norm(seed + 7), REPLACE] if draw(some) else []
    return [part for piece in pieces for part in (*replaced, *piece)]


def in_groups(lists: list[list[Part]]) -> tuple[list[list[Part]], int]:
    """Return the lists with layers of equal window and latent size in one group, and the number of
    groups."""
    groups: dict[tuple[int, int], int] = {}

    def placed(kind: str, f: dict[str, Any]) -> Part:
        if kind != "attention":
            return kind, f
        return kind, f | {"group": groups.setdefault((f["window"], f["latent"]), len(groups))}

    return [[placed(*part) for part in parts] for parts in lists], len(groups)


@given(st.lists(layers(), min_size=1, max_size=2), st.sampled_from(list(CONTEXTS)), st.data())
@settings(max_examples=40)
def test_a_stack_equals_its_operations(
    drawn: list[list[Part]], threads: int, data: st.DataObject
) -> None:
    """Runs chunks, then decode steps of few and of many rows, where threads share all rows or have
    separate ones. A step returns some tokens, in any order."""
    lists, groups = in_groups([made(parts) for parts in (plain_layer(), *drawn)])
    rows = data.draw(st.sampled_from([1, 3, 33, 50]))
    lens = data.draw(st.lists(st.integers(1, 120 // rows + 5), min_size=rows, max_size=rows))
    added = data.draw(st.booleans())
    stack = stack_of(CONTEXTS[threads], lists, added)
    own, other = pools(lists, rows), pools(lists, rows)
    stack.set_kv(own, "float32", BLOCK)
    old = [0] * rows
    for step, new in enumerate((lens, [1] * rows, [1] * rows)):
        batch = Batch(old, new, step)
        count = batch.starts[-1]
        outputs = np.random.default_rng(step).permutation(count)[: data.draw(st.integers(1, count))]
        want = one_by_one(lists, other, batch, added)[outputs]
        added_ids = batch.added_ids if added else None
        got = run(stack, batch, outputs, groups, added_ids=added_ids)
        assert got.tobytes() == want.tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(own, other, strict=True))
        parts_of = {kind for parts in lists for kind, _ in parts}
        alone = step and threads > 1 and rows >= 16 * threads
        alone = alone and not {"head_linear", "experts"} & parts_of
        assert stack.shares == (threads if alone else 0)
        old = batch.kv_lens


def test_the_last_layer_computes_only_keys_and_values_if_no_output_is_needed() -> None:
    lists = [made(plain_layer()), made(plain_layer())]
    stack, own, other = stack_of(CONTEXTS[2], lists), pools(lists, 1), pools(lists, 1)
    stack.set_kv(own, "float32", BLOCK)
    batch = Batch([0], [70])
    assert run(stack, batch, np.array([69]), kv_only=True).shape == (0, HIDDEN)
    one_by_one(lists, other, batch)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(own, other, strict=True))


def test_logits_are_the_product_of_hidden_states_and_head() -> None:
    stack, hidden = stack_of(CONTEXTS[2], [made(plain_layer())]), values(1, 5, HIDDEN)
    out = np.empty((5, VOCAB), np.float32)
    stack.logits(hidden, out)
    assert out.tobytes() == product(hidden, [head()]).tobytes()
