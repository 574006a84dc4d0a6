"""What a worker's card says of its KV, in the engine's own types; pure."""

from pdserve.engine.kv.identity import KvIdentity
from pdserve.engine.kv.spec import Kind, KvSpec, LayerGroup
from pdserve.protos import common_pb2 as pb

_KINDS: dict[pb.LayerGroup.Kind, Kind] = {
    pb.LayerGroup.WINDOW: "window",
    pb.LayerGroup.LATENT: "latent",
    pb.LayerGroup.STATE: "state",
}


def identity_of(card: pb.ModelCard) -> KvIdentity:
    """What computed it."""
    groups = card.kv_spec.groups
    return KvIdentity(
        digest=card.kv_identity,
        weights=card.weights_digest,
        quantization=card.quantization,
        configuration=card.config_digest,
        tokenizer=card.tokenizer_digest,
        kv_dtype=groups[0].dtype if groups else "",
        numerics=card.numerics_id,
    )


def layout_of(spec: pb.KvSpec) -> KvSpec:
    """The geometry of its blocks."""
    groups = tuple(
        LayerGroup(
            layers=tuple(g.layers),
            kind=_KINDS.get(g.kind, "full"),
            window=g.window,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            dtype=g.dtype,
            head_start=g.head_start,
            head_end=g.head_end,
            keys_by_dim=g.keys_by_dim,
        )
        for g in spec.groups
    )
    return KvSpec(spec.block_size, groups)
