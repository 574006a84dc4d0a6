"""An engine's figures as the Load that travels to routers.

The engine's types are known here by shape only: this folder does not import the engine.
"""

from collections.abc import Mapping
from typing import Any

from pdserve.protos import fleet_pb2 as pb


def load_of(
    stats: Any, figures: Mapping[str, Any], refusals: Mapping[str, int], stale: int
) -> pb.Load:
    """`stats`: the engine's; `figures`: TransportFigures by transport; `refusals`: by transport,
    how often a connection by it was refused."""
    blocks = stats.blocks
    transports = [
        pb.TransportCounters(
            transport=name,
            bytes=figures[name].num_bytes if name in figures else 0,
            frames=figures[name].frames if name in figures else 0,
            seconds=figures[name].seconds if name in figures else 0.0,
            refused=(figures[name].refused if name in figures else 0) + refusals.get(name, 0),
        )
        for name in sorted({*figures, *refusals})
    ]
    return pb.Load(
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        blocks_total=blocks.total,
        blocks_free=blocks.free,
        blocks_used=blocks.used,
        blocks_cached=blocks.cached,
        blocks_reserved=blocks.reserved,
        blocks_held=stats.held_blocks,
        blocks_parked=stats.parked_blocks,
        oldest_s=stats.oldest_s,
        step=stats.step,
        prefill_tokens_s=stats.prefill_tokens_s,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        preemptions=stats.preemptions,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        transports=transports,
        stale_messages=stale,
    )
