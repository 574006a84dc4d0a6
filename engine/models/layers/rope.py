"""Tables of cosines and sines for rotary embedding, grown as positions are reached."""

import math

import torch
from torch import Tensor

from pdserve.engine.models.config import RopeConfig

_FIRST_LEN = 2048  # positions of the first table


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position, float32 [rotary_dim / 2]; the kinds are described at RopeConfig."""
    exponent = torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim
    plain = 1.0 / rope.theta**exponent
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "factors":
            return plain / torch.tensor(rope.factors)
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope)
    raise ValueError(f"rope kind {rope.kind!r}")


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are divided by the factor, short ones kept, those between interpolated."""
    turns = rope.original_context_len * plain / (2 * math.pi)  # over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Dims that turn more than beta_fast times over the original context are kept, those that
    turn less than beta_slow times are divided by the factor, with a linear ramp between.
    """

    def dim_that_turns(times: float) -> float:
        turns_of_last = math.log(rope.original_context_len / (times * 2 * math.pi))
        return rope.rotary_dim * turns_of_last / (2 * math.log(rope.theta))

    low, high = dim_that_turns(rope.beta_fast), dim_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    divided = ((torch.arange(rope.rotary_dim // 2).float() - low) / width).clamp(0, 1)
    return (1 - divided) * plain + divided * plain / rope.factor


class RopeTable:
    """cos and sin of one RopeConfig, float32 [positions, rotary_dim / 2]."""

    def __init__(self, rope: RopeConfig, context_len: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope).to(device)
        self._scale = rope.attention_factor
        self._context_len = context_len
        self.cos = self.sin = torch.empty(0, rope.rotary_dim // 2, device=device)
        self.reserve(min(_FIRST_LEN, context_len))

    def reserve(self, num_positions: int) -> None:
        """Make the tables hold positions [0, num_positions)."""
        have = self.cos.shape[0]
        if num_positions <= have:
            return
        length = max(num_positions, min(2 * have, self._context_len))
        positions = torch.arange(length, device=self._frequencies.device).float()
        angles = positions[:, None] * self._frequencies
        self.cos, self.sin = angles.cos() * self._scale, angles.sin() * self._scale
