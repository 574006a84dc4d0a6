"""Bytes and operations of a model, counted by hand and by the code."""

import pytest
from roofline import Limits, ModelCost, as_bf16
from table import Work

COST = ModelCost(
    body_bytes=1000, body_values=1600, head_bytes=100, head_values=160, kv_bytes=8,
    attention_width=4,
)  # fmt: skip


def test_decode_of_one_reads_every_weight_and_every_key() -> None:
    limits = Limits(read_bytes_s=1.0, ops_s=1e9)
    assert COST.decode_step_s(limits, batch=1, context=10) == 1000 + 100 + 80
    assert COST.decode_step_s(limits, batch=3, context=10) == 1000 + 100 + 240


def test_decode_of_many_is_limited_by_operations() -> None:
    limits = Limits(read_bytes_s=1e9, ops_s=1.0)
    wanted = 2 * (1600 + 160) * 32 + 4 * 32 * 10 * 4
    assert COST.decode_step_s(limits, batch=32, context=10) == wanted


def test_prefill_computes_the_head_once_per_prompt_and_keys_causally() -> None:
    limits = Limits(read_bytes_s=1e9, ops_s=1.0)
    wanted = 2 * (1600 * 4 + 160) + 4 * (1 + 2 + 3 + 4) * 4
    assert COST.prefill_s(limits, batch=1, prompt=4) == wanted


def test_rates_count_the_tokens_of_the_phase() -> None:
    limits = Limits(read_bytes_s=1e9, ops_s=1.0)
    prefill = Work("prefill", 1, 4, 1)
    assert COST.tokens_per_s(limits, prefill) == pytest.approx(4 / COST.prefill_s(limits, 1, 4))
    decode = Work("decode", 8, 128, 64)
    step = COST.decode_step_s(limits, 8, 160)
    assert COST.tokens_per_s(limits, decode) == pytest.approx(8 / step)


def test_bf16_takes_two_bytes_per_value() -> None:
    half = as_bf16(COST)
    assert (half.body_bytes, half.head_bytes) == (3200, 320)
    assert (half.body_values, half.attention_width) == (1600, 4)
