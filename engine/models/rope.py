"""Rotary position embedding: its settings, and tables of cosines and sines that grow when a longer
text needs more positions.

Tables are computed in float64 and rounded once, so that every machine has the same ones.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
BY_CONTEXT = ("dynamic", "longrope")  # kinds that depend on the served context
_FIRST_LEN = 2048  # positions of the first table


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary position embedding (rope) of a layer (RoFormer, arXiv:2104.09864) and its scaling.

    Kinds: `default`; `linear` (positions / factor); `llama3` (Llama 3.1's smoothed factor); `yarn`
    (arXiv:2309.00071); `factors` (a divisor per frequency, like GGUF's rope_freqs.weight). Two
    kinds depend on the served context, not on a text's length, since keys are cached: `longrope`
    (arXiv:2402.13753) has other factors beyond the original context, `dynamic` another theta
    (NTK-aware scaling).
    """

    theta: float
    rotary_dim: int  # the first dims of a head that rotate; even
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_context_len: int = 0  # tokens before scaling: llama3, yarn, longrope, dynamic
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp's borders are whole dims
    attention_factor: float = 1.0  # multiplies cos and sin
    factors: tuple[float, ...] = ()  # rotary_dim / 2 divisors; longrope: for short contexts
    long_factors: tuple[float, ...] = ()  # longrope: for long contexts

    def of_keys(self) -> "RopeConfig":
        """Return the rope of the keys of a layer whose queries have this one."""
        return self


@dataclass(frozen=True, slots=True)
class QueryScaledRope(RopeConfig):
    """Rope that also scales queries by their position p, by 1 + query_beta * ln(1 + floor(p /
    original_context_len)), like Llama 4 and Ministral 3. It must rotate all dims of a head."""

    query_beta: float = 0.0

    def of_keys(self) -> RopeConfig:
        return RopeConfig(**{field.name: getattr(self, field.name) for field in fields(RopeConfig)})


def for_context(rope: RopeConfig, context_len: int) -> RopeConfig:
    """Return settings whose kind no longer depends on the context: for contexts of `context_len`
    tokens, longrope becomes `factors` and dynamic becomes `default`; other kinds are unchanged."""
    is_long = context_len > rope.original_context_len
    if rope.kind == "longrope":
        factors = rope.long_factors if is_long else rope.factors
        return replace(rope, kind="factors", factors=factors, long_factors=())
    if rope.kind == "dynamic":
        length = max(context_len, rope.original_context_len)
        growth = rope.factor * length / rope.original_context_len - (rope.factor - 1)
        theta = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return RopeConfig(theta, rope.rotary_dim)
    return rope


def inverse_frequencies(rope: RopeConfig) -> Floats:
    """Return the radians by which each pair of dims rotates per position, float32 [rotary_dim / 2];
    RopeConfig describes the kinds. Raises ValueError for a kind that depends on the context."""
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    powers: Any = np.power(rope.theta, exponent.astype(np.float64))
    plain: Floats = np.float32(1) / powers.astype(np.float32)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / np.float32(rope.factor)
        case "factors":
            factors: Floats = np.array(rope.factors, dtype=np.float32)
            return plain / factors
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope)
    raise ValueError(
        f"rope kind {rope.kind!r} has no frequencies: expected default, linear, factors, llama3 "
        "or yarn"
    )


def _llama3(plain: Floats, rope: RopeConfig) -> Floats:
    """Scale frequencies like Llama 3.1: divide those of long waves by the factor, keep those of
    short waves, and interpolate between."""
    turns = np.float32(rope.original_context_len) * plain / np.float32(2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    return _mixed(keep, plain, rope)


def _yarn(plain: Floats, rope: RopeConfig) -> Floats:
    """Scale frequencies like yarn: keep dims that turn more than beta_fast times over the original
    context, divide those that turn less than beta_slow times by the factor, with a linear ramp
    between."""

    def dim_that_turns(times: float) -> float:
        turns_of_last = math.log(rope.original_context_len / (times * 2 * math.pi))
        return rope.rotary_dim * turns_of_last / (2 * math.log(rope.theta))

    low, high = dim_that_turns(rope.beta_fast), dim_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    dims = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    divided = ((dims - np.float32(low)) / np.float32(width)).clip(0, 1)
    return _mixed(1 - divided, plain, rope)


def _mixed(keep: Any, plain: Floats, rope: RopeConfig) -> Floats:
    """Return the frequencies keep * plain + (1 - keep) * plain / factor."""
    mixed: Floats = keep * plain + (1 - keep) * plain / np.float32(rope.factor)
    return mixed


class RopeTable:
    """The tables of cos and sin of one RopeConfig, float32 [positions, rotary_dim / 2]."""

    def __init__(self, rope: RopeConfig, context_len: int) -> None:
        self._frequencies = inverse_frequencies(for_context(rope, context_len))
        self._rope = rope
        self._context_len = context_len
        self.cos: Floats = np.empty((0, rope.rotary_dim // 2), np.float32)
        self.sin = self.cos
        self.reserve(min(_FIRST_LEN, context_len))

    def reserve(self, num_positions: int) -> None:
        """Extend the tables, if necessary, to hold at least positions [0, num_positions)."""
        current_len = len(self.cos)
        if num_positions <= current_len:
            return
        length = max(num_positions, min(2 * current_len, self._context_len))
        positions = np.arange(length, dtype=np.float32)
        angles = (positions[:, None] * self._frequencies).astype(np.float64)
        scale: Any = self._rope.attention_factor
        if isinstance(self._rope, QueryScaledRope):
            turns = np.floor(positions / np.float32(self._rope.original_context_len))
            growth = 1 + self._rope.query_beta * np.log(1 + turns.astype(np.float64))
            scale = scale * growth[:, None]
        self.cos = (np.cos(angles) * scale).astype(np.float32)
        self.sin = (np.sin(angles) * scale).astype(np.float32)
