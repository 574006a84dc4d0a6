"""Type stubs of the compiled kernels, ordered by the files of native/bind in module.cpp."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = Tensor | NDArray[np.float32]

def isas() -> list[str]: ...

class Context:
    def __init__(
        self, threads: int, cpus: Sequence[int] = ..., isa: str = "", spin_us: int = 100
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...

class Matrix:
    @staticmethod
    def pack(
        context: Context, format: str, data: NDArray[np.uint8], rows: int, cols: int
    ) -> Matrix: ...
    @staticmethod
    def pack_groups(
        context: Context,
        format: str,
        codes: NDArray[np.uint8],
        type: str,
        scales: NDArray[np.uint8],
        zeros: NDArray[np.uint8] | None = None,
        divisors: NDArray[np.float32] | None = None,
    ) -> Matrix: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def layout(self) -> str: ...
    def row_values(self, context: Context, ids: NDArray[np.int64]) -> NDArray[np.float32]: ...

def formats() -> list[str]: ...
def grouped_formats() -> list[str]: ...
def quantized_formats() -> list[str]: ...
def quantize_into(format: str, values: NDArray[np.float32], out: NDArray[np.uint8]) -> bool: ...
def linear_into(
    context: Context,
    x: NDArray[np.float32],
    matrices: Sequence[Matrix],
    out: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> None: ...
def choose_experts(
    context: Context,
    logits: NDArray[np.float32],
    correction: NDArray[np.float32] | None,
    sigmoid: bool,
    normalized: bool,
    scale: float,
    groups: int,
    kept_groups: int,
    group_best: int,
    chosen: NDArray[np.int64],
    weights: NDArray[np.float32],
) -> None: ...
def rms_norm(context: Context, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
def layer_norm(
    context: Context, x: Floats, weight: Floats, bias: Floats, eps: float, out: Floats
) -> None: ...
def gated(context: Context, gate: Floats, up: Floats, activation: str, out: Floats) -> None: ...
def kv_block_bytes(
    type: str, kv_heads: int, block_size: int, head_dim: int, latent: int = 0
) -> int: ...
def write_kv(
    context: Context,
    kv: Tensor,
    type: str,
    block_size: int,
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    latent: int = 0,
) -> None: ...
def paged_attention(
    context: Context,
    q: Tensor,
    kv: Tensor,
    type: str,
    kv_heads: int,
    block_size: int,
    block_table: Tensor,
    starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    out: Tensor,
    sinks: Tensor | None = None,
    latent: int = 0,
) -> None: ...

class Stream:
    def __init__(
        self,
        vocab: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        choice: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        penalty_window: int = 0,
        logit_bias: Mapping[int, float] = ...,
        masked_ids: Sequence[int] = ...,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = ...,
    ) -> None: ...

class NativeSampler:
    def __init__(self, context: Context) -> None: ...
    def sample(
        self,
        logits: Tensor | NDArray[np.float32],
        rows: list[int],
        streams: list[Stream],
        generated: list[list[int]],
        masks: list[NDArray[np.uint32] | None] | None = None,
    ) -> list[int]: ...
    def logprobs(
        self,
        logits: Tensor | NDArray[np.float32],
        tokens: list[int],
        count: int,
        also: Sequence[int] = ...,
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]: ...

def gumbel_at(
    context: Context,
    seed: int,
    choice: int,
    position: int,
    ids: Tensor | NDArray[np.int64],
    out: Tensor | NDArray[np.float32],
) -> None: ...

class Stack:
    def __init__(
        self,
        context: Context,
        *,
        hidden: int,
        embed_scale: float,
        logit_scale: float,
        logit_soft_cap: float,
    ) -> None: ...
    def set_embedding(self, matrix: Matrix) -> None: ...
    def set_added_embedding(self, rows: NDArray[np.float32]) -> None: ...
    def set_rope(self, index: int, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None: ...
    def add_layer(self, parts: Sequence[tuple[str, Mapping[str, object]]]) -> None: ...
    def set_head(
        self,
        norm: tuple[str, Mapping[str, object]],
        matrix: Matrix,
        bias: NDArray[np.float32] | None = None,
    ) -> None: ...
    def set_kv(self, pools: list[NDArray[np.uint8]], dtype: str, block_size: int) -> None: ...
    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        starts: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: list[NDArray[np.int64]],
        slots: list[NDArray[np.int64]],
        outputs: NDArray[np.int64],
        kv_only: bool,
        added_ids: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]: ...
    @property
    def shares(self) -> int: ...
    def logits(self, hidden: NDArray[np.float32], out: NDArray[np.float32]) -> None: ...

def copy_and_hash(
    pool: NDArray[np.uint8],
    layer_bytes: int,
    block_bytes: int,
    first_layer: int,
    num_layers: int,
    blocks: NDArray[np.int32],
    slot: NDArray[np.uint8],
    key: NDArray[np.uint64],
    to_slot: bool,
) -> tuple[int, int]: ...
def copy_past_caches(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None: ...
