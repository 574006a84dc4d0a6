"""Native attention: it equals the formula in float64, and has the same bits however the work is
divided.

The file is long because one formula and every division of its work share sizes and caches.
"""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels import _native as native

TYPES = ("float32", "bfloat16", "float16", "int8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INFINITE = float("inf")
ONE = native.Context(1)
ALL = [native.Context(threads, isa=isa) for isa in native.isas() for threads in (1, 2)]


@dataclass(frozen=True)
class Sizes:
    """Shape of a pool and options of attention."""

    kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    block_size: int = 32
    type: str = "float32"
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    latent: int = 0  # how many values at a key's end are its value

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def block_bytes(self) -> int:
        sizes = (self.kv_heads, self.block_size, self.head_dim, self.latent)
        return int(native.kv_block_bytes(self.type, *sizes))


def stored(x: Tensor, kind: str) -> Tensor:
    """Return what a pool of that type stores of x [..., head_dim], as float64."""
    if kind != "int8":
        return x.to(DTYPES[kind]).double()
    most = x.abs().amax(-1, keepdim=True)
    return (x * (torch.tensor(127.0) / most)).round().double() * (most / 127).double()


@dataclass
class Cache:
    """Rows in shuffled blocks. Every slot without a key holds NaN, or -1 with a NaN scale."""

    sizes: Sizes
    lens: list[int]
    seed: int = 0
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)
    kv: Tensor = field(init=False)
    table: Tensor = field(init=False)
    sinks: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        s = self.sizes
        shape = (s.kv_heads, s.head_dim)
        self.keys = [torch.randn(n, *shape, generator=generator) for n in self.lens]
        self.values = [torch.randn(n, *shape, generator=generator) for n in self.lens]
        width = -(-max(self.lens) // s.block_size)
        order = torch.randperm(width * len(self.lens) + 1, generator=generator)
        self.table = order[1:].view(len(self.lens), width).contiguous()
        self.kv = torch.full((len(order), s.block_bytes), 255, dtype=torch.uint8)
        self.sinks = torch.linspace(-3, 4, s.heads) if s.sinks else None
        for row in range(len(self.lens)):
            self.write(row)

    def write(self, row: int) -> None:
        s = self.sizes
        position = torch.arange(self.lens[row])
        slots = self.table[row, position // s.block_size] * s.block_size + position % s.block_size
        values = None if s.latent else self.values[row]
        native.write_kv(ONE, self.kv, s.type, s.block_size, self.keys[row], values, slots, s.latent)

    def attend(
        self, q: Tensor, rows: list[tuple[int, int, int]], context: native.Context = ONE
    ) -> Tensor:
        """Run native attention. `rows` are (row, length up to its last token, tokens); q holds all
        tokens."""
        s, starts = self.sizes, [0]
        for _, _, tokens in rows:
            starts.append(starts[-1] + tokens)
        out = torch.full((len(q), s.heads, s.latent or s.head_dim), 777.0)
        native.paged_attention(
            context,
            q,
            self.kv,
            s.type,
            s.kv_heads,
            s.block_size,
            self.table[[row for row, _, _ in rows]].contiguous(),
            torch.tensor(starts),
            torch.tensor([length for _, length, _ in rows]),
            s.head_dim**-0.5,
            s.window,
            s.soft_cap,
            out,
            self.sinks,
            s.latent,
        )
        return out

    def queries(self, tokens: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, self.sizes.heads, self.sizes.head_dim, generator=generator)

    def formula(self, q: Tensor, row: int, length: int) -> Tensor:
        """Return attention of the last len(q) of `length` tokens of a row, in float64."""
        s = self.sizes
        k, v = (
            stored(x[row][:length], s.type).repeat_interleave(s.group, 1)
            for x in (self.keys, self.keys if s.latent else self.values)
        )
        v = v[..., -s.latent :]
        scores = torch.einsum("thd,khd->htk", q.double(), k) * s.head_dim**-0.5
        if s.soft_cap:
            scores = s.soft_cap * (scores / s.soft_cap).tanh()
        position = torch.arange(length - len(q), length)[:, None]
        key = torch.arange(length)
        seen = key <= position
        if s.window:
            seen &= key > position - s.window
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            beside = self.sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, beside), -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("htk,khd->thd", weights, v)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(
    st.builds(
        Sizes,
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 9),
        head_dim=st.sampled_from((8, 24, 64, 80, 96, 100, 128, 256)),
        block_size=st.sampled_from((16, 32, 48, 64)),
        type=st.sampled_from(TYPES),
        window=st.sampled_from((0, 0, 1, 7, 64, 100)),
        soft_cap=st.sampled_from((0.0, 0.0, 5.0)),
        sinks=st.booleans(),
        latent=st.sampled_from((0, 0, 8, 5)),
    ),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(0, 1000),
)
@settings(max_examples=60)
def test_formula(sizes: Sizes, rows: list[tuple[int, int]], seed: int) -> None:
    cache = Cache(sizes, [length for length, _ in rows], seed)
    batch = [(i, length, min(length, tokens)) for i, (length, tokens) in enumerate(rows)]
    q = cache.queries(sum(tokens for _, _, tokens in batch), seed)
    out = cache.attend(q, batch)
    at = 0
    for row, length, tokens in batch:
        expected = cache.formula(q[at : at + tokens], row, length)
        torch.testing.assert_close(out[at : at + tokens].double(), expected, atol=3e-6, rtol=3e-6)
        at += tokens
    for context in ALL:
        assert same_bits(cache.attend(q, batch, context), out)


VARIANTS = (
    Sizes(),
    Sizes(type="bfloat16"),
    Sizes(type="float16", window=100, kv_heads=1, group=4, sinks=True),
    Sizes(type="int8", head_dim=24, group=1),
    Sizes(type="bfloat16", soft_cap=3.0, window=513, kv_heads=1, group=8, head_dim=80),
    Sizes(head_dim=128, kv_heads=1, group=2, sinks=True),
    Sizes(type="bfloat16", head_dim=256, kv_heads=1, group=4, window=512),
    Sizes(type="float16", head_dim=80, kv_heads=1, group=5, latent=64),
    Sizes(type="int8", head_dim=52, kv_heads=2, group=3, latent=40),
    Sizes(head_dim=576, kv_heads=1, group=7, latent=512),
)


SLOW = [pytest.param(VARIANTS[n], marks=pytest.mark.kernels) for n in (4, 6, 9)]


@pytest.mark.parametrize("sizes", [*VARIANTS[:4], VARIANTS[5], *VARIANTS[7:9], *SLOW], ids=str)
def test_chunks_and_other_rows_do_not_change_a_token(sizes: Sizes) -> None:
    """Covers single tokens, chunks of several sizes, other rows in the batch, and all targets and
    thread counts."""
    length = 600
    cache = Cache(sizes, [length, 300, 1, 65])
    q = cache.queries(length)
    alone = torch.cat([cache.attend(q[t : t + 1], [(0, t + 1, 1)]) for t in range(length)])
    torch.testing.assert_close(alone.double(), cache.formula(q, 0, length), atol=3e-6, rtol=3e-6)
    # `alone` is the best instruction set on one thread, token by token.
    best, each = ALL[:2], ALL[1::2]
    for size, contexts in ((1, best[1:]), (7, best), (64, best), (512, each), (length, best)):
        for context in contexts:
            parts = [
                cache.attend(
                    q[t : t + size], [(0, min(t + size, length), len(q[t : t + size]))], context
                )
                for t in range(0, length, size)
            ]
            assert same_bits(torch.cat(parts), alone), (size, context.isa, context.threads)
    others = cache.queries(3 + 40, 5)
    for context in ALL:
        batch = [(1, 300, 1), (0, 512, 100), (2, 1, 1), (3, 65, 40), (1, 299, 1)]
        mixed = torch.cat((others[:1], q[412:512], others[1:]))
        assert same_bits(cache.attend(mixed, batch, context)[1:101], alone[412:512])


def test_a_batch_of_32_equals_each_row_alone(subtests: pytest.Subtests) -> None:
    for sizes in VARIANTS:
        with subtests.test(sizes=sizes):
            lens = [1 + 37 * i % 300 for i in range(32)]
            cache = Cache(sizes, lens)
            q = cache.queries(32)
            together = cache.attend(q, [(i, n, 1) for i, n in enumerate(lens)])
            for i, n in enumerate(lens):
                for context in ALL:  # alone on two threads, a row is divided by keys
                    assert same_bits(
                        cache.attend(q[i : i + 1], [(i, n, 1)], context), together[i : i + 1]
                    )


def test_a_long_row_divided_by_keys(subtests: pytest.Subtests) -> None:
    for type in TYPES:
        with subtests.test(type):
            cache = Cache(Sizes(type=type, sinks=type == "float32"), [5000, 20])
            for tokens in (1, 3):
                q = cache.queries(tokens)
                whole = cache.attend(q, [(0, 5000, tokens)])
                expected = cache.formula(q, 0, 5000)
                torch.testing.assert_close(whole.double(), expected, atol=3e-6, rtol=3e-6)
                for threads in (2, 3, 7):
                    context = native.Context(threads)
                    for _ in range(3):
                        assert same_bits(cache.attend(q, [(0, 5000, tokens)], context), whole)
                    both = cache.attend(
                        torch.cat((cache.queries(1, 3), q)),
                        [(1, 20, 1), (0, 5000, tokens)],
                        context,
                    )
                    assert same_bits(both[1:], whole)


def test_block_size_does_not_change_the_result(subtests: pytest.Subtests) -> None:
    for sizes in VARIANTS:
        with subtests.test(sizes=sizes):
            results = []
            for block_size in (16, 32, 64, 208):
                cache = Cache(replace(sizes, block_size=block_size), [333])
                q = cache.queries(101)
                results.append(cache.attend(torch.cat((q, q[:1])), [(0, 333, 101), (0, 200, 1)]))
            assert all(same_bits(result, results[0]) for result in results[1:])


def test_a_bad_key_or_value_affects_only_tokens_that_see_it(subtests: pytest.Subtests) -> None:
    for bad, type in product(
        (float("nan"), float("inf"), -float("inf")), ("float32", "bfloat16", "float16", "int8")
    ):
        with subtests.test(bad=bad, type=type):
            sizes = Sizes(type=type, window=70, kv_heads=2, group=2)
            clean = Cache(sizes, [300, 40])
            q = torch.cat((clean.queries(300), clean.queries(1, 9)))
            batch = [(0, 300, 300), (1, 40, 1)]
            before = clean.attend(q, batch)
            for where in ("keys", "values"):
                cache = Cache(sizes, [300, 40])
                getattr(cache, where)[0][150, 1, 5] = bad  # query heads 2 and 3 use kv head 1
                cache.write(0)
                after = cache.attend(q, batch)
                hit = torch.zeros(301, 4, dtype=torch.bool)
                hit[150:220, 2:] = True
                assert same_bits(after[~hit], before[~hit])
                finite = after[hit].isfinite()
                if bad == bad or where == "values":
                    # An infinite score gives a weight of 0 or NaN depending on its sign, as in any
                    # softmax.
                    assert not (where == "values" and finite[:, 5].any())
                else:
                    assert not finite.any()
                if type == "int8":
                    assert not finite.any() or (where == "keys" and bad == bad)
                if bad != bad:
                    whole_row = where == "keys" or type == "int8"
                    assert not (finite.any() if whole_row else finite[:, 5].any())
                for context in ALL:
                    again = cache.attend(q, batch, context)
                    assert same_bits(again[~hit], before[~hit])
                    assert torch.equal(again.isfinite(), after.isfinite())


def test_a_sink_far_above_and_far_below_all_scores() -> None:
    cache = Cache(Sizes(kv_heads=1, group=3, sinks=True), [100])
    cache.sinks = torch.tensor([1e30, -1e30, -INFINITE])
    q = cache.queries(1)
    out = cache.attend(q, [(0, 100, 1)])
    assert torch.equal(out[0, 0], torch.zeros(64))
    cache.sinks = None
    assert same_bits(out[:, 1:], cache.attend(q, [(0, 100, 1)])[:, 1:])


def test_scores_far_apart() -> None:
    """Covers weights that underflow, and a maximum near the end."""
    cache = Cache(Sizes(kv_heads=1, group=1), [400])
    cache.keys[0].mul_(60)
    cache.write(0)
    q = cache.queries(400) * 8
    expected = cache.formula(q, 0, 400)
    torch.testing.assert_close(
        cache.attend(q, [(0, 400, 400)]).double(), expected, atol=2e-3, rtol=0
    )


def test_write_kv_follows_the_layout(subtests: pytest.Subtests) -> None:
    """Compares the pool byte by byte; other slots are unchanged."""
    for type in TYPES:
        with subtests.test(type):
            s = Sizes(type=type, kv_heads=2, head_dim=24, block_size=16)
            rtol = 1e-6 if type == "int8" else 0
            for context in ALL:
                kv = torch.full((3, s.block_bytes), 7, dtype=torch.uint8)
                before = kv.clone()
                k, v = torch.randn(2, 2, 24), torch.randn(2, 2, 24)
                k[0, 0, :4] = torch.tensor([1e-30, -1e30, 0.5, -0.0]) if type != "float16" else 0.25
                native.write_kv(context, kv, type, 16, k, v, torch.tensor([2 * 16 + 5, 15]))
                assert torch.equal(kv[1], before[1])
                dtype = DTYPES.get(type, torch.int8)
                size = torch.empty(0, dtype=dtype).element_size()
                flat = (
                    kv[:, : 2 * 2 * 16 * 24 * size].contiguous().view(dtype).view(3, 2, 2, 16 * 24)
                )
                for token, (block, offset) in enumerate(((2, 5), (0, 15))):
                    keys = flat[block, 0].view(2, 24, 16)[:, :, offset].float()
                    values = flat[block, 1].view(2, 16, 24)[:, offset].float()
                    if type == "int8":
                        scales = kv[block, 2 * 2 * 16 * 24 :].contiguous().view(torch.float32)
                        keys = keys * scales.view(2, 2, 16, 1)[0, :, offset]
                        values = values * scales.view(2, 2, 16, 1)[1, :, offset]
                    for found, x in ((keys, k), (values, v)):
                        wanted = stored(x[token], type)
                        torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=0)
                assert int((kv != before).any(0).sum()) <= 2 * 2 * 2 * (24 * size + 4)


def test_a_latent_cache_equals_a_cache_with_stored_values(subtests: pytest.Subtests) -> None:
    """The bits equal those of a cache whose values are the ends of its keys. int8 is an exception,
    since its scales differ."""
    for type in TYPES:
        with subtests.test(type):
            plain = Sizes(type=type, kv_heads=1, group=14, head_dim=64, block_size=32)
            latent = Sizes(type=type, kv_heads=1, group=14, head_dim=64, block_size=32, latent=48)
            caches = [Cache(s, [150, 70]) for s in (plain, latent)]
            for row, keys in enumerate(caches[0].keys):
                caches[0].values[row] = keys.roll(48, -1)  # values are the keys' ends
                caches[0].write(row)
            q = caches[0].queries(60 + 1)
            batch = [(0, 150, 60), (1, 70, 1)]
            expected = caches[0].attend(q, batch)[:, :, :48].contiguous()
            for context in ALL:
                assert same_bits(caches[1].attend(q, batch, context), expected)
            assert latent.block_bytes * 2 == plain.block_bytes


def test_a_latent_cache_takes_no_values() -> None:
    s = Sizes(latent=16)
    k, slots = torch.zeros(1, 3, 64), torch.tensor([0])
    kv = torch.zeros(1, s.block_bytes, dtype=torch.uint8)
    native.write_kv(ONE, kv, "float32", 32, k, None, slots, 16)
    for v, latent in ((k, 16), (None, 0)):
        with pytest.raises(ValueError, match="v is of layers that are not latent"):
            native.write_kv(ONE, kv, "float32", 32, k, v, slots, latent)
    for latent in (-1, 65):
        with pytest.raises(ValueError, match="latent must be 0 to head_dim"):
            native.kv_block_bytes("float32", 3, 32, 64, latent)


def test_float16_keeps_finite_numbers_finite() -> None:
    """Every target writes the same bytes; infinity and NaN are kept."""
    s = Sizes(type="float16", kv_heads=1, group=1, head_dim=24, block_size=16)
    k = torch.randn(1, 1, 24)
    k[0, 0, :6] = torch.tensor([7e4, -3e38, 65519.0, INFINITE, -INFINITE, float("nan")])
    for context in ALL:
        kv = torch.zeros(1, s.block_bytes, dtype=torch.uint8)
        native.write_kv(context, kv, "float16", 16, k, -k, torch.tensor([5]))
        keys, values = kv.view(torch.float16).view(2, 16 * 24)
        assert keys.view(24, 16)[:5, 5].tolist() == [65504, -65504, 65504, INFINITE, -INFINITE]
        assert keys.view(24, 16)[5, 5].isnan()
        assert values.view(16, 24)[5, :5].tolist() == [-65504, 65504, -65504, -INFINITE, INFINITE]
        assert torch.equal(keys.view(24, 16)[6:, 5], k[0, 0, 6:].half())


def test_int8_stores_zeros_exactly() -> None:
    s = Sizes(type="int8", kv_heads=1, group=1, head_dim=16)
    cache = Cache(s, [5])
    cache.values[0].zero_()
    cache.write(0)
    assert torch.equal(cache.attend(cache.queries(1), [(0, 5, 1)]), torch.zeros(1, 1, 16))


def test_arguments_that_do_not_fit_are_refused() -> None:
    s = Sizes()
    cache = Cache(s, [40, 40])
    q = cache.queries(2)

    def attend(**changes: Any) -> None:
        arguments: dict[str, Any] = {
            "context": ONE,
            "q": q,
            "kv": cache.kv,
            "type": "float32",
            "kv_heads": 3,
            "block_size": 32,
            "block_table": cache.table,
            "starts": torch.tensor([0, 1, 2]),
            "kv_lens": torch.tensor([40, 40]),
            "scale": 0.125,
            "window": 0,
            "soft_cap": 0.0,
            "out": torch.empty_like(q),
        }
        native.paged_attention(**(arguments | changes))

    attend()
    bad: dict[str, dict[str, Any]] = {
        "type of keys": {"type": "f64"},
        "kv_block_bytes": {"type": "bfloat16"},
        "multiple of kv_heads": {"kv_heads": 2, "kv": torch.zeros(9, 2 * 2 * 32 * 64 * 4).byte()},
        "multiple of 16": {"block_size": 24},
        "window": {"window": -1},
        "soft_cap": {"soft_cap": -1.0},
        "starts must run": {"starts": torch.tensor([0, 1, 1])},
        "starts must have": {"starts": torch.tensor([0, 2])},
        "starts must not": {"starts": torch.tensor([0, 3, 2])},
        "own tokens": {"kv_lens": torch.tensor([40, 0])},
        "no more than": {"kv_lens": torch.tensor([40, 65])},
        "does not have": {"block_table": cache.table + 3},
        "one row a row": {"block_table": cache.table[:1]},
        "shape of q": {"out": torch.empty(1, 9, 64)},
        "latent must": {"latent": 65, "out": torch.empty(2, 9, 65)},
        "sinks must have": {"sinks": torch.empty(8)},
    }
    for match, changes in bad.items():
        with pytest.raises(ValueError, match=match):
            attend(**changes)
    with pytest.raises(ValueError, match="slot"):
        native.write_kv(
            ONE,
            cache.kv,
            "float32",
            32,
            torch.zeros(1, 3, 64),
            torch.zeros(1, 3, 64),
            torch.tensor([len(cache.kv) * 32]),
        )
    with pytest.raises(TypeError):
        attend(out=torch.empty(2, 9, 64, dtype=torch.float64))
