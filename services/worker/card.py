"""A loaded model as a ModelCard, and the blobs that the card names."""

import json

from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.kv.spec import Kind, KvSpec
from pdserve.protos import common_pb2 as pb
from pdserve.services.host.blobs import blob_digest

_KINDS: dict[Kind, pb.LayerGroup.Kind] = {
    "full": pb.LayerGroup.FULL,
    "window": pb.LayerGroup.WINDOW,
    "latent": pb.LayerGroup.LATENT,
    "state": pb.LayerGroup.STATE,
}


def model_card(
    card: CardData, spec: KvSpec, kv_identity: bytes, numerics_id: str
) -> tuple[pb.ModelCard, list[bytes]]:
    """The card and its blobs; `kv_identity` is the digest of the engine's."""
    template = card.chat_template.encode()
    config = card.generation_config
    generation = json.dumps(config, sort_keys=True).encode() if config else b""
    message = pb.ModelCard(
        name=card.name,
        architecture=card.architecture,
        context_len=card.context_len,
        vocab_size=card.vocab_size,
        eos_ids=card.eos_ids,
        bos_id=card.bos_id or 0,
        has_bos=card.bos_id is not None,
        adds_bos=card.adds_bos,
        tokenizer_digest=blob_digest(card.tokenizer_json),
        template_digest=blob_digest(template),
        generation_config_digest=blob_digest(generation),
        weights_digest=card.weights_digest,
        quantization=card.quantization,
        kv_identity=kv_identity,
        numerics_id=numerics_id,
        kv_spec=kv_spec(spec),
        config_digest=card.config_digest,
        created=card.created,
        weights_bytes=card.weights_bytes,
    )
    return message, [card.tokenizer_json, template, generation]


def kv_spec(spec: KvSpec) -> pb.KvSpec:
    """The geometry of the KV cache as it travels."""
    groups = [
        pb.LayerGroup(
            layers=group.layers,
            kind=_KINDS[group.kind],
            window=group.window,
            block_bytes=group.block_bytes(spec.block_size),
            dtype=group.dtype,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            head_start=group.head_start,
            head_end=group.head_end,
            keys_by_dim=group.keys_by_dim,
        )
        for group in spec.groups
    ]
    return pb.KvSpec(block_size=spec.block_size, groups=groups)
