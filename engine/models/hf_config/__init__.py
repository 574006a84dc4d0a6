"""Reads config.json."""

from pdserve.engine.models.hf_config.experts import (
    grouped_routing,
    num_experts,
    routing,
    sparse_layers,
    with_experts,
)
from pdserve.engine.models.hf_config.fields import HfConfig, integer, positive, table
from pdserve.engine.models.hf_config.rope import read_rope, scores_magnitude
from pdserve.engine.models.hf_config.standard import (
    head_dim,
    num_layers,
    plain_layers,
    sliding_window,
    soft_cap,
    windowed,
)
