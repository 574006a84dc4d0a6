"""The model that fake workers claim to serve: one token per byte, `MARKS` of them printable."""

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from builders.byte_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, write_tokenizer
from scale.shape import BLOCK, MODEL
from scale.shared_prompts import IDENTITY

from pdserve.engine.kv import KvSpec, encode_spec
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.rpc import BlobCache, blob_digest

GetBlob = Callable[[str], Awaitable[bytes | None]]


def model() -> tuple[pb.ModelCard, BlobCache]:
    """Its card, and the files that the card names."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = (Path(folder) / "tokenizer.json").read_bytes()
    template = CHAT_TEMPLATE.encode()
    blobs = BlobCache()
    blobs.add(tokenizer)
    blobs.add(template)
    card = pb.ModelCard(
        name=MODEL,
        architecture="Fake",
        context_len=8192,
        vocab_size=VOCAB_SIZE,
        tokenizer_digest=blob_digest(tokenizer),
        template_digest=blob_digest(template),
        kv_identity=pb.KvIdentity(digest=IDENTITY, weights="ab" * 32, numerics="none"),
        kv_spec=encode_spec(KvSpec(BLOCK, ())),
        created=1,
        weights_bytes=1,
    )
    return card, blobs
