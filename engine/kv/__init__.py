"""The KV pool: its geometry, blocks, prefix cache and identity."""

from pdserve.engine.kv.block_hash import cache_seed, chain_hashes, next_hash
from pdserve.engine.kv.block_pool import NULL_BLOCK, BlockCopy, BlockCounts, BlockPool, num_blocks
from pdserve.engine.kv.codec import (
    decode_identity,
    decode_spec,
    encode_identity,
    encode_spec,
    spec_digest,
)
from pdserve.engine.kv.identity import (
    NO_MIXING,
    UNKNOWN,
    Difference,
    KvIdentity,
    Mixing,
    differences,
    refusal,
)
from pdserve.engine.kv.spec import (
    Kind,
    KvSpec,
    LayerGroup,
    Pages,
    blocks_for,
    pool_sizes,
    spec_difference,
    window_blocks,
)
