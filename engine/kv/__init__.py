"""The KV pool: the layout of cached keys and values, their blocks, the prefix cache, and the
identity that decides which processes can share KV."""

from pdserve.engine.kv.block_pool import (
    NULL_BLOCK,
    BlockCopy,
    BlockCounts,
    BlockPool,
    cache_seed,
    chain_hashes,
    next_hash,
    num_blocks,
)
from pdserve.engine.kv.identity import (
    NO_MIXING,
    UNKNOWN,
    Difference,
    KvIdentity,
    Mixing,
    decode_identity,
    differences,
    encode_identity,
    refusal,
)
from pdserve.engine.kv.spec import (
    Kind,
    KvSpec,
    LayerGroup,
    Pages,
    blocks_for,
    decode_spec,
    encode_spec,
    pool_sizes,
    spec_difference,
    spec_digest,
    window_blocks,
)
