"""A stack names the part in its error if a list of parts cannot run, and refuses memory and steps
that do not fit."""

from typing import Any

import numpy as np
import pytest
from oracles.native_parts import (
    ADD,
    ADD_HELD,
    BLOCK,
    COS,
    HEAD_DIM,
    HIDDEN,
    HOLD,
    LAST,
    ONE,
    QKV,
    SIN,
    VOCAB,
    Batch,
    Part,
    attention,
    embedding,
    experts,
    head,
    head_linear,
    linear,
    made,
    matrix,
    norm,
    plain_layer,
    pools,
    reorder,
    rope,
    run,
    stack_of,
    values,
)

from pdserve.kernels import _native as native


def changed(n: int, *parts: Part) -> list[Part]:
    """Return a plain layer in which `parts` replace part n."""
    layer = plain_layer()
    return [*layer[:n], *parts, *layer[n + 1 :]]


def without(n: int, name: str) -> list[Part]:
    kind, fields = plain_layer()[n]
    return changed(n, (kind, {key: value for key, value in fields.items() if key != name}))


def fields(n: int, **other: Any) -> list[Part]:
    kind, before = plain_layer()[n]
    return changed(n, (kind, before | other))


def rope_of_one_head() -> Part:
    return "rope", {"table": 0, "heads": 1, "head_dim": HEAD_DIM, "begin": 0}


WRONG_LISTS = (
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
        changed(1, ("head_linear", {"matrices": [(1, 8, 8, "F32"), (1, 8, 9, "F32")], "kept": 0})),
        r"part 1 \(head_linear\): the matrices must have one size",
    ),
    (
        changed(1, head_linear(1, 0, "F32")),
        r"part 1 \(head_linear\): its heads have 128 values, a row 64",
    ),
    (
        changed(1, ("head_layer_norm", {"weight": values(1, 96), "eps": 1e-6, "heads": 3})),
        r"part 1 \(head_layer_norm\): it reads up to value 96, but a row has 64",
    ),
    (
        changed(1, ("head_layer_norm", {"weight": values(1, 64), "eps": 1e-6, "heads": 3})),
        r"part 1 \(head_layer_norm\): weight must have equally many values for each head",
    ),
    (changed(3, linear(2, 128, QKV)), "layer 1: it has no attention"),
    ([*plain_layer(), *changed(2)], r"part 13 \(attention\): a layer has one attention"),
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
    (
        changed(4, rope_of_one_head(), linear(3, HIDDEN, 128)),
        r"part 4 \(rope\): it comes behind the attention, where rows are renumbered",
    ),
    ([("xielu", {"a": 1.0, "b": 1.0, "beta": 1.0})], r"part 0 \(xielu\): eps is missing"),
    (
        changed(6, linear(1, 96, HIDDEN), experts(1)),
        r"part 7 \(experts\): inputs of 64, not 96",
    ),
    (changed(0, reorder(1, 60)), r"part 0 \(reorder\): order of 60, not 64"),
    (
        changed(0, ("reorder", {"order": np.zeros(HIDDEN, np.int64)})),
        r"part 0 \(reorder\): order must have each value of a row once",
    ),
    (
        changed(0, ("reorder", {"order": np.arange(1, HIDDEN + 1)})),
        r"part 0 \(reorder\): order must have each value of a row once",
    ),
    (changed(10), r"part 9 \(linear\): a layer must end with add"),
)


def test_an_invalid_list_of_parts_is_refused(subtests: pytest.Subtests) -> None:
    for parts, message in WRONG_LISTS:
        with subtests.test(message):
            stack = native.Stack(
                ONE, hidden=HIDDEN, embed_scale=1.0, logit_scale=1.0, logit_soft_cap=0.0
            )
            stack.set_rope(0, COS, SIN)
            stack.add_layer(made(plain_layer()))
            with pytest.raises(ValueError, match=message):
                stack.add_layer(made(parts))
            stack.add_layer(made(plain_layer()))  # the refused layer left nothing behind


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


def test_the_last_norm_must_be_a_norm() -> None:
    stack = native.Stack(ONE, hidden=HIDDEN, embed_scale=1.0, logit_scale=1.0, logit_soft_cap=0.0)
    stack.set_rope(0, COS, SIN)
    stack.add_layer(made(plain_layer()))
    with pytest.raises(ValueError, match="the last norm: activate is none"):
        stack.set_head(("activate", {"activation": "silu"}), head())
    stack.set_head(("layer_norm", {**LAST[1], "bias": None}), head())


WRONG_EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"gates": [], "ups": [], "downs": []}, "it has no experts"),
    ({"ups": []}, "gates, ups and downs must be as many"),
    ({"router": []}, "router must be its matrix, and a shared expert's gate"),
    ({"router": [(1, 6, HIDDEN, "F32")] * 2}, "router must be its matrix"),
    ({"router": [(1, 5, HIDDEN, "F32")]}, "the router must have one row an expert"),
    ({"router": [(1, 6, HIDDEN, "Q8_0")]}, "the router must be of float32 or float16"),
    ({"router": [(1, 6, HIDDEN, "FP8")]}, "the router must be of float32 or float16"),
    ({"router": [(1, 6, 96, "F32")]}, "an expert: a product is not over 96 values"),
    ({"gates": [(1, 48, HIDDEN, "F32")] * 6}, "an expert: gate, up and down must have one size"),
    ({"gate_up_biases": values(1, 5, HIDDEN)}, "biases must be one an expert"),
    ({"down_biases": values(1, 6, 9)}, "an expert: a bias must have one value an output"),
    ({"bias": values(1, 5)}, "bias must have one value an expert"),
    ({"correction": values(1, 7)}, "correction must have one value an expert"),
    ({"shared": [(1, 32, HIDDEN, "F32")]}, "shared must be gate, up and down, or nothing"),
    (
        {
            "shared": [(1, 32, HIDDEN, "F32")] * 3,
        },
        "the shared expert: a product is not over 64 values",
    ),
    ({"top_k": 7}, "top_k must be 1 to the experts"),
    ({"groups": 4}, "experts must be a multiple of groups"),
    ({"groups": 2, "kept_groups": 3}, "kept_groups must be 1 to groups"),
    ({"groups": 6, "group_best": 2}, "group_best must be 1 or 2, and no more than a group has"),
    ({"groups": 3, "top_k": 3}, "top_k is more than the kept groups have"),
    ({"activation": "relu"}, "activation must be silu"),
]


def test_invalid_experts_are_refused(subtests: pytest.Subtests) -> None:
    for changes, message in WRONG_EXPERTS:
        with subtests.test(message):
            kind, f = experts(1)
            stack = native.Stack(
                ONE, hidden=HIDDEN, embed_scale=1.0, logit_scale=1.0, logit_soft_cap=0.0
            )
            stack.set_rope(0, COS, SIN)
            with pytest.raises(ValueError, match=rf"part 7 \(experts\): {message}"):
                stack.add_layer(made([*plain_layer()[:7], (kind, f | changes), ADD]))


def ready(lists: list[list[Part]]) -> native.Stack:
    stack = stack_of(ONE, [made(parts) for parts in lists])
    stack.set_kv(pools(lists, 1), "float32", BLOCK)
    return stack


def test_a_step_has_no_more_outputs_than_tokens() -> None:
    stack, batch = ready([plain_layer()]), Batch([0], [3])
    assert run(stack, batch, np.array([2, 2, 0])).shape == (3, HIDDEN)
    with pytest.raises(ValueError, match="more outputs than tokens"):
        run(stack, batch, np.zeros(2000, np.int64))


def test_ids_of_an_added_embedding_are_checked() -> None:
    stack, batch, outputs = ready([plain_layer()]), Batch([0], [3]), np.array([2])
    only = "added_ids, if an added embedding is set, and only then"
    with pytest.raises(ValueError, match=only):
        run(stack, batch, outputs, added_ids=np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="embedding width"):
        stack.set_added_embedding(values(1, 9, HIDDEN + 1))
    stack.set_added_embedding(values(1, 9, HIDDEN))
    assert run(stack, batch, outputs, added_ids=np.array([0, 8, 0])).shape == (1, HIDDEN)
    for ids, message in (
        (None, only),
        (np.array([0, 1]), "one added id a token"),
        (np.array([0, 9, 0]), "a row of the added embedding"),
        (np.array([0, -1, 0]), "a row of the added embedding"),
    ):
        with pytest.raises(ValueError, match=message):
            run(stack, batch, outputs, added_ids=ids)


def test_block_ids_are_checked_against_the_smallest_pool_of_a_group() -> None:
    lists = [plain_layer(), plain_layer()]
    large, small = pools(lists, 1)
    small = small[:5].copy()

    def batch(first_block: int, first_slot: int) -> Batch:
        made = Batch([0], [3])
        made.table = np.arange(first_block, first_block + 5)[None]
        made.slots += first_slot
        return made

    for own in ([small, large], [large, small]):
        stack = stack_of(ONE, [made(parts) for parts in lists])
        stack.set_kv(own, "float32", BLOCK)
        run(stack, batch(0, 5 * BLOCK - 3), np.array([2]))
        with pytest.raises(ValueError, match="a slot outside the pool"):
            run(stack, batch(0, 5 * BLOCK - 2), np.array([2]))
        with pytest.raises(ValueError, match="a block outside the pool"):
            run(stack, batch(1, 0), np.array([2]))


def test_each_group_of_layers_needs_its_tables() -> None:
    windowed = [attention(1, 8) if part[0] == "attention" else part for part in plain_layer()]
    stack = ready([plain_layer(), windowed])
    for groups in (1, 3):
        with pytest.raises(ValueError, match="tables and slots for each group"):
            run(stack, Batch([0], [3]), np.array([2]), groups)


def test_pools_are_used_without_conversion_or_refused() -> None:
    """A converted copy would be freed after the call."""
    stack, batch = ready([plain_layer()]), Batch([0], [3])
    want = run(stack, batch, np.array([2]))
    (pool,) = pools([plain_layer()], 1)
    for wrong in (pool[::2], pool.view(np.float32), pool.astype(np.int16), pool.tolist()):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            stack.set_kv([wrong], "float32", BLOCK)
    size = pool.shape[1]
    odd = np.zeros(pool.size + 4, np.uint8)[1 : pool.size + 1].reshape(pool.shape)
    for given, type, block, message in (
        ([], "float32", BLOCK, "one KV array a layer"),
        ([pool], "float64", BLOCK, "the type of keys must be float32"),
        ([pool], "float32", 24, "block_size must be a multiple of 16, at most 65536"),
        ([pool], "float32", 2**62, "block_size must be a multiple of 16, at most 65536"),
        ([pool], "float32", -16, "block_size must be a multiple of 16"),
        ([pool[:, : size // 2].copy()], "float32", BLOCK, "kv_block_bytes bytes a block"),
        ([odd], "float32", BLOCK, "kv must be aligned to 4 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            stack.set_kv(given, type, block)
    # The previously set pool is still in use.
    assert run(stack, batch, np.array([2])).tobytes() == want.tobytes()


def test_logits_are_written_only_to_a_fitting_array() -> None:
    stack, hidden = ready([plain_layer()]), values(1, 5, HIDDEN)
    for out in (
        np.empty((5, VOCAB), np.float64),
        np.empty((5, 2 * VOCAB), np.float32)[:, ::2],
        np.empty((VOCAB, 5), np.float32).T,
    ):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            stack.logits(hidden, out)
