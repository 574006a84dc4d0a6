"""Builds an engine from its options: loads the model, sizes the KV pool, measures the chunk."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.engine import Engine
from pdserve.engine.execution.batch import Batch, GroupTable
from pdserve.engine.execution.memory import pool_bytes
from pdserve.engine.execution.runner import Model
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.spec import KvSpec, blocks_for
from pdserve.engine.load import load_model
from pdserve.engine.models.identity import kv_identity, numerics_id
from pdserve.engine.scheduling.limits import EngineLimits

log = logging.getLogger(__name__)

CHUNK_S = 0.1  # what a prefill chunk should take
CHUNKS = (64, 128, 256, 512, 1024, 2048)


def build_engine(
    config: EngineConfig, progress: Callable[[str, float], None] = lambda what, fraction: None
) -> tuple[Engine, CardData]:
    """An engine ready to step, and its model's card with the context length that it really has.

    `progress` gets what is being done and the fraction of it. Raises CheckpointError from loading
    and ValueError for options that contradict each other.
    """
    loaded = load_model(config, progress)
    decoder, card = loaded.decoder, loaded.card
    spec = KvSpec(config.block_size, decoder.kv_groups)
    num_blocks = _pool_blocks(config, spec, card.context_len)
    context_len = min(card.context_len, num_blocks * spec.block_size)
    kv = KvCache(spec, num_blocks, config.device)
    progress("warming up", 0.0)
    chunk_size = config.chunk_size or measure_chunk(decoder, kv, context_len)
    token_s = measure_token(decoder, kv, context_len)
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
            max_waiting=config.max_waiting,
            eos_ids=frozenset(card.eos_ids),
        ),
        loaded.ops,
        kv_identity=kv_identity(card, kv_dtype, numerics),
        numerics_id=numerics,
        prefix_cache=config.prefix_cache,
        token_s=token_s,
    )
    log.info(
        "KV pool: %d tokens (%d blocks of %d, %.0f MB); context %d; chunk %d",
        num_blocks * spec.block_size,
        num_blocks,
        spec.block_size,
        num_blocks * spec.bytes_per_block() / 1e6,
        context_len,
        chunk_size,
    )
    progress("ready", 1.0)
    return engine, replace(card, context_len=context_len)


def _pool_blocks(config: EngineConfig, spec: KvSpec, context_len: int) -> int:
    """Blocks per layer group. By default no more than a full batch of full contexts needs."""
    if config.kv_tokens:
        return max(1, config.kv_tokens // spec.block_size)
    room = pool_bytes(config.device, config.host_engines) // spec.bytes_per_block()
    most = config.max_running * blocks_for(context_len, spec.block_size)
    if room < 1:
        raise ValueError("not enough free memory for a KV pool; --kv-tokens sets its size")
    return min(room, most)


def measure_chunk(model: Model, kv: KvCache, context_len: int) -> int:
    """The power of two from 64 to 2048 whose chunk takes nearest to 100 ms; warms the model up."""
    most = min(context_len, kv.num_blocks * kv.spec.block_size)
    best, distance = CHUNKS[0], math.inf
    _chunk_seconds(model, kv, min(CHUNKS[0], most))  # the first pass allocates
    for size in CHUNKS:
        if size > most:
            break
        seconds = _chunk_seconds(model, kv, size)
        if abs(math.log(seconds / CHUNK_S)) < distance:
            best, distance = size, abs(math.log(seconds / CHUNK_S))
        if seconds > CHUNK_S:
            break
    return best


def measure_token(model: Model, kv: KvCache, context_len: int) -> float:
    """Seconds that a token of the shortest chunk takes, once the model is warm."""
    size = min(CHUNKS[0], context_len, kv.num_blocks * kv.spec.block_size)
    return min(_chunk_seconds(model, kv, size) for _ in range(2)) / size


@torch.inference_mode()
def _chunk_seconds(model: Model, kv: KvCache, size: int) -> float:
    """One chunk of `size` tokens from position 0, on blocks that nobody has yet."""
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
    float(model.logits(model.forward(batch, kv))[0, 0])  # waits for a device
    return time.perf_counter() - started


def set_compute_threads(num_threads: int) -> None:
    """How many threads the operators of this process use; call it before `build_engine`."""
    torch.set_num_threads(num_threads)
