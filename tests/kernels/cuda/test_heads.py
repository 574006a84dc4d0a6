"""Norms of heads, rope and new keys and values in one launch, compared with the reference."""

import pytest
import torch
from fakes import triton_interpreter as _  # noqa: F401  (before kernels run)
from torch import Tensor

from pdserve.kernels import reference
from pdserve.kernels.cuda.layer import HeadNorms, HeadRange, Rotation, prepare_heads

pytestmark = pytest.mark.kernels

CASES = [  # tokens, q, kv, dim, rotary dim, block size, dtype of the cache
    (1, 1, 1, 16, 16, 16, torch.float32),
    (3, 4, 2, 64, 64, 16, torch.bfloat16),
    (2, 8, 8, 128, 128, 32, torch.bfloat16),
    (5, 3, 1, 80, 80, 16, torch.float16),
    (4, 6, 2, 96, 48, 16, torch.float16),
    (2, 2, 2, 256, 64, 32, torch.bfloat16),
    (7, 16, 1, 64, 32, 8, torch.float32),
    (1, 7, 7, 48, 0, 16, torch.float16),
    (3, 12, 4, 192, 192, 64, torch.bfloat16),
    (9, 2, 1, 32, 20, 16, torch.bfloat16),
    (2, 5, 5, 112, 112, 16, torch.float32),
    (6, 8, 4, 64, 0, 16, torch.bfloat16),
]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tables(rotary: int) -> Rotation | None:
    if not rotary:
        return None
    angles = torch.arange(40)[:, None] * (0.3 ** torch.arange(rotary // 2))
    return Rotation(angles.cos().float(), angles.sin().float())


def expected(
    x: Tensor,
    heads: HeadRange,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    positions: Tensor,
    kv: Tensor,
    slots: Tensor,
) -> None:
    """Return the reference's result."""
    rows = x[:, heads.begin :][:, : (heads.q + 2 * heads.kv) * heads.dim]
    rows = rows.unflatten(1, (-1, heads.dim))
    qk = rows[:, : heads.q + heads.kv]
    if norms:
        for some, weight in ((qk[:, : heads.q], norms.q), (qk[:, heads.q :], norms.k)):
            some.copy_(reference.rms_norm(some, weight, norms.eps))
    if rotation:
        qk.copy_(reference.rope(qk, positions, rotation.cos, rotation.sin))
    values = rows[:, heads.q + heads.kv :] if heads.values else None
    reference.write_kv(kv, qk[:, heads.q :], values, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_heads(case: tuple[int, ...], has_norms: bool, dtype: torch.dtype) -> None:
    tokens, q, kv_heads, dim, rotary, block_size, kv_dtype = case
    heads = HeadRange(0, q, kv_heads, kv_heads, dim)
    x = drawn(1, tokens, (q + 2 * kv_heads) * dim + 3).to(dtype)
    norms = HeadNorms(drawn(2, dim), drawn(3, dim), 1e-6) if has_norms else None
    positions = torch.randperm(40, generator=torch.Generator().manual_seed(4))[:tokens]
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(5))[:tokens]
    kv = drawn(6, 5, 2, kv_heads, block_size, dim).to(kv_dtype)
    theirs, their_kv = x.clone(), kv.clone()
    expected(theirs, heads, norms, tables(rotary), positions, their_kv, slots)
    prepare_heads(x, heads, norms, tables(rotary), positions, kv, slots)
    most = 1e-5 if dtype == torch.float32 else 1e-2
    q_columns = q * dim
    difference = (x[:, :q_columns].double() - theirs[:, :q_columns].double()).norm()
    assert difference <= most * theirs[:, :q_columns].double().norm()
    assert torch.equal(x[:, q_columns:][:, -3:], theirs[:, -3:])
    kept = 1e-5 if {dtype, kv_dtype} == {torch.float32} else 1e-2
    assert (kv.double() - their_kv.double()).norm() <= kept * their_kv.double().norm()


def test_a_negative_slot_is_not_written() -> None:
    heads = HeadRange(0, 1, 1, 1, 16)
    x, kv = drawn(1, 3, 48), torch.zeros(3, 2, 1, 16, 16)
    positions = torch.zeros(3, dtype=torch.int64)
    prepare_heads(x, heads, None, None, positions, kv, torch.tensor([-1, 17, -1]))
    assert torch.equal(kv[1, 0, 0, 1], x[1, 16:32])
    assert torch.equal(kv[1, 1, 0, 1], x[1, 32:48])
    kv[1, :, 0, 1] = 0
    assert not kv.any()


def test_queries_and_a_latent_key_in_one_row() -> None:
    """A row is [queries | key]; only the first dims of each rotate."""
    queries, key = HeadRange(0, 2, 0, 0, 24), HeadRange(48, 0, 1, 0, 40)
    x, rotation = drawn(1, 2, 88), tables(16)
    assert rotation is not None
    positions, kv = torch.tensor([3, 9]), torch.zeros(2, 1, 1, 16, 40)
    before, slots = x.clone(), torch.tensor([16, 20])
    prepare_heads(x, queries, None, rotation, positions, None, slots)
    prepare_heads(x, key, None, rotation, positions, kv, slots)
    turned = reference.rope(before[:, :48].view(2, 2, 24), positions, rotation.cos, rotation.sin)
    torch.testing.assert_close(x[:, :48], turned.flatten(1))
    turned = reference.rope(before[:, 48:].view(2, 1, 40), positions, rotation.cos, rotation.sin)
    torch.testing.assert_close(kv[1, 0, 0, [0, 4]], turned[:, 0])


def test_float16_clamps_large_finite_values() -> None:
    x = torch.tensor([[0.0, 1e5, -1e6, float("inf"), float("nan"), 1.0]])
    kv = torch.zeros(1, 1, 1, 16, 6, dtype=torch.float16)
    slots = positions = torch.tensor([0])
    prepare_heads(x, HeadRange(0, 0, 1, 0, 6), None, None, positions, kv, slots)
    written = kv[0, 0, 0, 0].float()
    assert written[:4].tolist() == [0.0, 65504.0, -65504.0, float("inf")]
    assert written[4].isnan()
