"""Each layer refuses values just outside the table of sampling bounds, and accepts those at them.

tests/gateway/test_api_bounds.py does the same for the two public APIs.
"""

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from builders.sampling_edges import inside, outside

from pdserve.engine.api import (
    BOUNDS,
    MAX_CHOICES,
    MAX_ENTRIES,
    InvalidRequest,
    Request,
    SamplingParams,
)
from pdserve.engine.scheduling import EngineLimits
from pdserve.kernels._native import Stream
from pdserve.kernels.sampling_ops import StreamSettings
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import RequestProgress
from pdserve.services.decode.convert import to_params, to_request
from pdserve.text import RequestedSampling
from pdserve.text.generation_config import GenerationDefaults

LIMITS = EngineLimits(
    vocab_size=64,
    context_len=1 << 20,
    block_size=16,
    num_blocks=1 << 17,
    max_running=200,
    chunk_size=16,
)  # fmt: skip
UNBOUNDED = {"stop_token_ids", "ignore_eos"}  # ids of the vocabulary, and a boolean
CONSTRAINTS = {"allowed_token_ids", "bad_words", "grammar", "thinking", "logprob_token_ids"}
MODEL_DEFAULTS = [field.name for field in fields(GenerationDefaults)]


def engine_edges(edges: Any) -> list[tuple[str, float]]:
    return [(name, value) for name, row in BOUNDS.items() for value in edges(name, row.engine)]


def api_edges(edges: Any, names: Any = BOUNDS) -> list[tuple[str, float]]:
    return [(name, value) for name in names for value in edges(name, BOUNDS[name].api)]


def request(name: str, value: Any) -> Request:
    if name == "seed":
        return Request("r", (1, 2), SamplingParams(), value)
    if name == "min_tokens":
        return Request("r", (1, 2), SamplingParams(min_tokens=value, max_tokens=100), 0)
    given = {1: value} if name == "logit_bias" else value
    return Request("r", (1, 2), SamplingParams(**{name: given}), 0)


def test_the_table_has_every_parameter() -> None:
    on_the_wire = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    in_the_engine = {field.name for field in fields(SamplingParams)}
    assert on_the_wire == in_the_engine == (BOUNDS.keys() - {"seed"}) | UNBOUNDED | CONSTRAINTS
    of_clients = {field.name for field in fields(RequestedSampling)}
    assert BOUNDS.keys() | UNBOUNDED | MAX_ENTRIES.keys() <= of_clients


def test_clients_may_send_nothing_that_the_engine_refuses() -> None:
    for name, row in BOUNDS.items():
        assert row.api.high <= row.engine.high
        # -1 is 0, a top_p of 0 is a top_k of 1, and a seed counts modulo 2**64.
        if name not in ("top_k", "top_p", "seed"):
            assert row.api.low >= row.engine.low
            assert row.api.open_low >= row.engine.open_low


def test_the_engine_accepts_values_at_its_bounds(subtests: pytest.Subtests) -> None:
    for name, value in engine_edges(inside):
        with subtests.test(f"{name}={value}"):
            LIMITS.check(request(name, value))


def test_the_engine_refuses_values_just_outside(subtests: pytest.Subtests) -> None:
    for name, value in [*engine_edges(outside), ("temperature", math.nan)]:
        with subtests.test(f"{name}={value}"):
            with pytest.raises(InvalidRequest) as refused:
                LIMITS.check(request(name, value))
            assert refused.value.param == name


def test_the_engine_gets_every_value_that_clients_may_send(subtests: pytest.Subtests) -> None:
    """Floats in messages have 32 bits, so bounds of both sides must not lie within a rounding."""
    for name, value in api_edges(inside, BOUNDS.keys() - {"seed"}):
        if (name, value) == ("top_p", 0):
            continue  # the gateway sends a top_k instead
        with subtests.test(f"{name}={value}"):
            sent: Any = max(0, value) if name == "top_k" else value
            given = {1: sent} if name == "logit_bias" else sent
            start = pb.Start(seed=2**64 - 1, params=pb.SamplingParams(**{name: given}))
            if name == "min_tokens":
                start.params.max_tokens = 100
            found = to_request("r", start, [1, 2])
            LIMITS.check(found)
            if name != "logit_bias":
                assert getattr(found.params, name) == pytest.approx(sent)


def test_omitted_fields_have_the_engine_s_defaults() -> None:
    assert to_params(pb.SamplingParams()) == SamplingParams()


def test_router_and_decode_have_the_same_bounds_of_choices() -> None:
    def start(n: int) -> pb.Start:
        return pb.Start(prompt_ids=[1], params=pb.SamplingParams(n=n))

    assert len(RequestProgress(start(MAX_CHOICES), [1]).choices) == MAX_CHOICES
    assert to_request("r", start(MAX_CHOICES), [1]).params.n == MAX_CHOICES
    for make in (RequestProgress, lambda start, ids: to_request("r", start, ids)):
        with pytest.raises(ServiceError) as refused:
            make(start(MAX_CHOICES + 1), [1])
        assert (refused.value.code, refused.value.param) == (pb.INVALID_ARGUMENT, "n")


def test_the_native_sampler_accepts_every_value_of_the_engine(subtests: pytest.Subtests) -> None:
    settings = {field.name for field in fields(StreamSettings)} & BOUNDS.keys() - {"seed"}
    assert settings
    for name, value in engine_edges(inside):
        if name in settings:
            with subtests.test(f"{name}={value}"):
                given: Any = {1: value} if name == "logit_bias" else value
                Stream(64, **{name: given})


def test_the_native_sampler_refuses_values_it_cannot_compute(subtests: pytest.Subtests) -> None:
    for name, value in (
        ("temperature", -0.1), ("temperature", math.inf), ("top_p", 0.0), ("min_p", -0.1),
        ("min_p", 1.1), ("repetition_penalty", 0.0),
    ):  # fmt: skip
        with subtests.test(f"{name}={value}"):
            assert not BOUNDS[name].engine.has(value)
            with pytest.raises(ValueError, match="must be"):
                Stream(64, **{name: value})  # type: ignore[arg-type]


def test_a_model_may_recommend_values_that_a_client_may_send(subtests: pytest.Subtests) -> None:
    for name, value in api_edges(inside, MODEL_DEFAULTS):
        with subtests.test(f"{name}={value}"):
            found = getattr(GenerationDefaults.from_json(json.dumps({name: value})), name)
            assert found == (max(value, 0) if name == "top_k" else value)


def test_a_model_s_other_recommendations_are_ignored(subtests: pytest.Subtests) -> None:
    for name, value in api_edges(outside, MODEL_DEFAULTS):
        with subtests.test(f"{name}={value}"):
            found = GenerationDefaults.from_json(json.dumps({name: value}))
            assert found == GenerationDefaults()
