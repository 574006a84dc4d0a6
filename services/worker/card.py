"""Builds the ModelCard of a loaded model, and the blobs that the card names."""

import json

from pdserve.engine.checkpoints import CardData
from pdserve.engine.kv import KvIdentity, KvSpec, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.rpc import blob_digest


def model_card(
    card: CardData, identity: KvIdentity, spec: KvSpec
) -> tuple[pb.ModelCard, list[bytes]]:
    """Return the card and its blobs. `identity` and `spec` are the engine's."""
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
        kv_identity=pb.KvIdentity(**identity.parts()),
        kv_spec=encode_spec(spec),
        created=card.created,
        weights_bytes=card.weights_bytes,
        pooling=card.pooling,
        normalizes=card.normalizes,
        hidden_size=card.hidden_size,
        score_token_ids=card.score_ids,
    )
    return message, [card.tokenizer_json, template, generation]
