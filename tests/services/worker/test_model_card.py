"""The model card as a message: each fact of the loaded model is in a separate field."""

from dataclasses import fields, replace

import pytest
from fakes.decoder import fake_spec
from systems.worker_kit import CARD

from pdserve.engine.api import RANK
from pdserve.engine.kv import KvIdentity, decode_spec
from pdserve.gateway.capabilities import Scoring, scoring_of
from pdserve.protos import common_pb2 as pb
from pdserve.services.worker.runtime import model_card, task_of

IDENTITY = KvIdentity(b"d" * 16, "aa", "Q4_1", "cc", "70", "bfloat16", "native/avx512")


@pytest.mark.parametrize(
    ("bos_id", "adds_bos"), [(None, False), (0, False), (0, True), (7, False), (7, True)]
)
def test_having_a_bos_token_and_adding_it_are_separate_fields(
    bos_id: int | None, adds_bos: bool
) -> None:
    card = replace(CARD, bos_id=bos_id, adds_bos=adds_bos, eos_ids=(9, 2))
    message, _ = model_card(card, IDENTITY, fake_spec())
    assert (message.has_bos, message.adds_bos) == (bos_id is not None, adds_bos)
    assert message.bos_id == (bos_id or 0)
    assert list(message.eos_ids) == [9, 2]  # the first one is the template's


def test_the_purpose_of_a_model() -> None:
    generating, _ = model_card(CARD, IDENTITY, fake_spec())
    assert (generating.pooling, list(generating.score_token_ids)) == ("", [])
    embedder = replace(CARD, pooling="mean", normalizes=True, hidden_size=48)
    message, _ = model_card(embedder, IDENTITY, fake_spec())
    assert (message.pooling, message.normalizes, message.hidden_size) == ("mean", True, 48)
    both, _ = model_card(replace(CARD, pool="mean", normalizes=True), IDENTITY, fake_spec())
    assert (both.pooling, both.pool, both.normalizes) == ("", "mean", True)
    reranker, _ = model_card(replace(CARD, score_ids=(9, 2)), IDENTITY, fake_spec())
    assert list(reranker.score_token_ids) == [9, 2]
    base = replace(CARD, chat_template="")
    chatting = replace(CARD, chat_template="{{ x }}")
    scorer = replace(CARD, pooling=RANK)
    cards = (chatting, base, embedder, replace(CARD, score_ids=(9, 2)), scorer)
    assert [task_of(card) for card in cards] == ["chat", "complete", "embed", "score", "score"]
    message, _ = model_card(scorer, IDENTITY, fake_spec())
    assert scoring_of(message) is Scoring.HEAD


def test_the_card_has_the_whole_identity_and_layout() -> None:
    message, _ = model_card(CARD, IDENTITY, fake_spec())
    assert KvIdentity.of(message.kv_identity) == IDENTITY
    assert decode_spec(message.kv_spec) == fake_spec()
    assert {f.name for f in pb.KvIdentity.DESCRIPTOR.fields} == {f.name for f in fields(KvIdentity)}
