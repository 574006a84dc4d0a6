"""Builds an engine from its options: loads the model, measures its speed to choose the chunk size,
and sizes the KV pool."""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pdserve.engine.api import ConfigError, EngineConfig
from pdserve.engine.backends import Backend
from pdserve.engine.checkpoints import CardData
from pdserve.engine.constraints.grammars import GrammarBackend
from pdserve.engine.engine import Engine
from pdserve.engine.execution import Batch, GroupTable, Model
from pdserve.engine.kv import KvSpec, blocks_for, pool_sizes
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.load import load_model
from pdserve.engine.models import kv_identity, numerics_id
from pdserve.engine.scheduling import EngineLimits

log = logging.getLogger(__name__)

CHUNK_S = 0.1  # target duration of a prefill chunk
MIN_SHARE = 8  # minimum of EngineLimits.shared_step_tokens, however slow rows are
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def build_engine(
    config: EngineConfig, progress: Callable[[str, float], None] = lambda activity, fraction: None
) -> tuple[Engine, CardData]:
    """Build an engine that is ready to step. Return it with the model's card, whose context length
    is reduced to what the KV pool can hold.

    `progress` receives the current activity and its completed fraction, from 0 to 1. Raises
    CheckpointError if loading fails, and ConfigError if options contradict each other or no KV pool
    fits in memory.
    """
    loaded = load_model(config, progress)
    decoder, backend, card = loaded.decoder, loaded.backend, loaded.card
    if card.is_encoder and config.chunk_size:
        log.warning(
            "--chunk-size %d has no effect: a step of an encoder computes a whole text of up to %d "
            "tokens",
            config.chunk_size,
            card.context_len,
        )
    spec = KvSpec(config.block_size, decoder.kv_groups)
    progress("warming up", 0.0)
    max_size = min(card.context_len, config.kv_tokens or card.context_len, CHUNKS[-1])
    trial_sizes = (blocks_for(max_size, spec.block_size),) * len(spec.groups)
    measured = measure(decoder, backend.kv_cache(spec, trial_sizes), max_size)
    chunk_size = config.chunk_size or measured.chunk_size
    if config.step_tokens:
        chunk_size = min(chunk_size, config.step_tokens - config.max_running)
    if card.is_encoder:
        chunk_size = card.context_len
    num_blocks = _num_blocks(config, backend, spec, card, chunk_size)
    context_len = min(card.context_len, num_blocks * spec.block_size)
    sizes = pool_sizes(spec, num_blocks, config.max_running, chunk_size)
    kv = backend.kv_cache(spec, sizes)
    backend.prepare(decoder, kv)
    kv_dtype = spec.groups[0].dtype
    numerics = numerics_id(decoder.numerics, kv_dtype, config.weights)
    engine = Engine(
        decoder,
        kv,
        EngineLimits(
            vocab_size=card.vocab_size,
            context_len=context_len,
            block_size=spec.block_size,
            num_blocks=num_blocks,
            max_running=config.max_running,
            chunk_size=chunk_size,
            step_tokens=config.step_tokens,
            # The tokens that take as long as one row alone, which reads all weights.
            shared_step_tokens=max(MIN_SHARE, round(measured.row_s / measured.token_s)),
            max_waiting=config.max_waiting,
            eos_ids=frozenset(card.eos_ids),
            pooling=loaded.head.pooling if loaded.head else card.pooling,
            pool=card.pool,
            scores=bool(card.score_ids),
        ),
        backend.sampling,
        kv_identity=kv_identity(card, kv_dtype, numerics),
        numerics_id=numerics,
        prefix_cache=config.prefix_cache and not card.is_encoder,
        token_s=measured.token_s,
        score=loaded.head,
        grammars=GrammarBackend(card.tokenizer_json, card.vocab_size, card.eos_ids),
    )
    log.info(
        "KV pool: %d tokens (%d blocks of %d, %.0f MB); context length: %d tokens; "
        "prefill chunk: %d tokens",
        num_blocks * spec.block_size,
        num_blocks,
        spec.block_size,
        spec.pool_bytes(sizes) / 1e6,
        context_len,
        chunk_size,
    )
    progress("ready", 1.0)
    return engine, replace(card, context_len=context_len)


def _num_blocks(
    config: EngineConfig, backend: Backend, spec: KvSpec, card: CardData, chunk_size: int
) -> int:
    """Return the number of KV blocks of a layer group with full attention; the size of window
    groups follows from it (pool_sizes).

    With --kv-tokens, that many tokens; otherwise as many blocks as fit in memory, at most those
    that a full batch of maximum contexts needs, or for an encoder, which keeps no KV, one step.
    Raises ConfigError if none fits.
    """
    if config.kv_tokens:
        return max(1, config.kv_tokens // spec.block_size)

    def num_bytes(num_blocks: int) -> int:
        return spec.pool_bytes(pool_sizes(spec, num_blocks, config.max_running, chunk_size))

    max_blocks = config.max_running * blocks_for(card.context_len, spec.block_size)
    if card.is_encoder:
        step_tokens = config.step_tokens or config.max_running + chunk_size
        step_blocks = config.max_running + blocks_for(step_tokens, spec.block_size)
        max_blocks = min(max_blocks, step_blocks)
    fit = bisect_right(range(1, max_blocks + 1), backend.pool_bytes(), key=num_bytes)
    if fit < 1:
        raise ConfigError(
            "the free memory is too small for a KV pool; set the pool's size with --kv-tokens"
        )
    return fit


class Measured(NamedTuple):
    """Measured speed of a model on this machine, and the prefill chunk size chosen by it."""

    chunk_size: int  # power of two from 64 to 8192 whose chunk takes closest to 100 ms
    token_s: float  # seconds per token in a chunk
    row_s: float  # seconds for a token alone


def measure(model: Model, kv: KvCache, max_size: int) -> Measured:
    """Warm up the model and measure its speed with prefill chunks of increasing size, up to
    `max_size` tokens. Stops when the next size would be further from the target of 100 ms per
    chunk.

    `kv`: a KV pool with blocks for `max_size` tokens in each layer group.
    """
    first_size = min(CHUNKS[0], max_size)
    longest_s = CHUNK_S / math.sqrt(2)  # above this, twice the size is further from 100 ms
    _chunk_seconds(model, kv, 1)  # the first pass reads all weights
    durations: dict[int, float] = {}
    for size in (first_size, *CHUNKS[1:]):
        if size > max_size or (durations and durations[size // 2] >= longest_s):
            break
        durations[size] = _chunk_seconds(model, kv, size)
        if durations[size] >= longest_s:  # the first run of a size compiles or loads kernels
            durations[size] = min(durations[size], _chunk_seconds(model, kv, size))
    best_size = min(durations, key=lambda size: abs(math.log(durations[size] / CHUNK_S)))
    return Measured(
        max(best_size, CHUNKS[0]),
        min(seconds / size for size, seconds in durations.items()),
        min(_chunk_seconds(model, kv, 1) for _ in range(2)),
    )


def _chunk_seconds(model: Model, kv: KvCache, size: int) -> float:
    """Run one prefill chunk of `size` tokens from position 0 and return its duration in seconds.
    Writes blocks of `kv` without allocating them."""
    positions = np.arange(size)
    table = np.arange(1, blocks_for(size, kv.spec.block_size) + 1)[None]
    group = GroupTable(table, positions + kv.spec.block_size)  # from block 1 on
    batch = Batch(
        token_ids=np.zeros_like(positions),
        positions=positions,
        starts=(0, size),
        kv_lens=(size,),
        num_decode_rows=0,
        groups=(group,) * len(kv.spec.groups),
        logit_tokens=positions[-1:],
    )
    started = time.perf_counter()
    float(model.logits(model.forward(batch, kv))[0, 0])  # waits for the device
    return time.perf_counter() - started
