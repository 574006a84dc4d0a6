"""Differences in KV identity that are named, and the exact differences that each option admits."""

from dataclasses import replace
from itertools import product

import pytest

from pdserve.engine.checkpoints import CardData
from pdserve.engine.kv import KvIdentity, Mixing, differences, refusal
from pdserve.engine.models import (
    PRE_NORMS,
    LayerConfig,
    ModelConfig,
    configuration_digest,
    kv_identity,
)
from pdserve.engine.models.rope import RopeConfig

CARD = CardData(
    name="m",
    architecture="Llama",
    context_len=100,
    vocab_size=64,
    eos_ids=(),
    bos_id=None,
    adds_bos=False,
    tokenizer_json=b"{}",
    chat_template="",
    weights_digest="aa" * 32,
    quantization="Q4_1",
    created=0,
    weights_bytes=1,
    config_digest="cc" * 32,
)
IDENTITY = kv_identity(CARD, "bf16", "native-1/cpu/avx512")
OTHERS = {
    "weights": kv_identity(replace(CARD, weights_digest="bb" * 32), "bf16", IDENTITY.numerics),
    "configuration": kv_identity(replace(CARD, config_digest="dd" * 32), "bf16", IDENTITY.numerics),
    "tokenizer": kv_identity(replace(CARD, tokenizer_json=b"[]"), "bf16", IDENTITY.numerics),
    "kv_dtype": kv_identity(CARD, "float32", IDENTITY.numerics),
    "numerics": kv_identity(CARD, "bf16", "native-1/cpu/avx2"),
}


def test_each_part_is_named_and_changes_the_digest(subtests: pytest.Subtests) -> None:
    for what in OTHERS:
        with subtests.test(what):
            (found,) = differences(IDENTITY, OTHERS[what])
            assert found.what == what
            assert " on this side, " in found.text
            assert found.text.endswith(" on the peer")
            # No key depends on the tokenizer, which is compared separately.
            assert (OTHERS[what].digest == IDENTITY.digest) == (what == "tokenizer")


def test_a_difference_of_weights_names_both_formats() -> None:
    other = kv_identity(
        replace(CARD, weights_digest="bb" * 32, quantization="Q8_0"), "bf16", IDENTITY.numerics
    )
    (found,) = differences(IDENTITY, other)
    assert found.text == "weights aaaaaaaaaaaa (Q4_1) on this side, bbbbbbbbbbbb (Q8_0) on the peer"


def test_an_option_admits_only_its_difference(subtests: pytest.Subtests) -> None:
    for what, weights, numerics in product(OTHERS, (False, True), (False, True)):
        with subtests.test(what=what, weights=weights, numerics=numerics):
            admitted = (what == "weights" and weights) or (what == "numerics" and numerics)
            found = refusal(IDENTITY, OTHERS[what], Mixing(weights, numerics))
            assert (found is None) == admitted
            assert refusal(IDENTITY, IDENTITY, Mixing(weights, numerics)) is None


def test_two_differences_need_both_options() -> None:
    both = replace(OTHERS["weights"], numerics="other", digest=b"x" * 16)
    for mixing, named in (
        (Mixing(), "weights"),
        (Mixing(weights=True), "numerics"),
        (Mixing(numerics=True), "weights"),
    ):
        found = refusal(IDENTITY, both, mixing)
        assert found is not None
        assert found.what == named
    assert refusal(IDENTITY, both, Mixing(True, True)) is None


def test_a_difference_in_unknown_parts_is_never_admitted() -> None:
    """If a peer does not send the parts, other differences cannot be excluded."""
    for silent in (
        KvIdentity(b"x" * 16),
        replace(OTHERS["weights"], configuration=""),
        replace(OTHERS["numerics"], weights=""),
    ):
        found = refusal(IDENTITY, silent, Mixing(True, True))
        assert found is not None
        assert found.what == "identity"
        assert found.text.startswith("KV identity ")
    assert refusal(IDENTITY, KvIdentity(IDENTITY.digest), Mixing()) is None, (
        "equal digests must be enough"
    )


def test_the_digest_covers_rope_and_the_context_length_only_where_rope_depends_on_it() -> None:
    rope = RopeConfig(theta=10000.0, rotary_dim=8)
    config = ModelConfig(
        architecture="Llama", vocab_size=64, hidden_size=8, ffn_size=8, num_heads=1,
        num_kv_heads=1, head_dim=8, context_len=100, layers=(LayerConfig(rope),), norms=PRE_NORMS,
        norm_eps=1e-5,
    )  # fmt: skip
    digest = configuration_digest(config)
    assert configuration_digest(replace(config, context_len=200)) == digest
    as_gguf = replace(config, norm_eps=9.999999747378752e-06)  # 1e-5 as float32
    assert configuration_digest(as_gguf) == digest
    longrope = RopeConfig(
        1e4, 2, "longrope", original_context_len=100, factors=(1.0,), long_factors=(2.0,)
    )
    short = replace(config, layers=(LayerConfig(longrope),))
    assert configuration_digest(replace(short, context_len=90)) == configuration_digest(short)
    assert configuration_digest(replace(short, context_len=101)) != configuration_digest(short)
    theta = LayerConfig(replace(rope, theta=500000.0))
    assert configuration_digest(replace(config, layers=(theta,))) != digest
    assert configuration_digest(replace(config, norm_eps=1e-6)) != digest
