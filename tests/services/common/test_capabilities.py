"""What a model does, according to its card, and the card of workers that differ."""

from typing import Any

import pytest

from pdserve.protos.common_pb2 import ModelCard
from pdserve.services.common.capabilities import (
    Scoring,
    embeds,
    generates,
    merged_card,
    pooling_of,
    scoring_of,
)

CHAT: dict[str, Any] = {"context_len": 9}
BOTH: dict[str, Any] = {"pool": "mean", "normalizes": True, "hidden_size": 8, "context_len": 2}
EMBEDDER: dict[str, Any] = {"pooling": "last", "hidden_size": 4}
SCORER: dict[str, Any] = {"scores_pairs": True, "hidden_size": 3}
JUDGE: dict[str, Any] = {"score_token_ids": [1, 2]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (CHAT, (True, False, "", None)),
        (BOTH, (True, True, "mean", Scoring.SIMILARITY)),
        (EMBEDDER, (False, True, "last", Scoring.SIMILARITY)),
        (SCORER, (False, False, "score", Scoring.HEAD)),
        (JUDGE, (False, False, "", Scoring.ANSWER)),
    ],
)
def test_what_a_model_does(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    card = ModelCard(**fields)
    assert (generates(card), embeds(card), pooling_of(card), scoring_of(card)) == expected


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ([CHAT], CHAT),
        ([CHAT, BOTH], BOTH | CHAT),
        ([EMBEDDER, CHAT], CHAT | {"pool": "last", "hidden_size": 4}),
        ([EMBEDDER, BOTH], BOTH | {"pool": "last", "hidden_size": 4, "normalizes": False}),
        ([SCORER, CHAT], CHAT),
        ([SCORER, EMBEDDER], SCORER),
        ([EMBEDDER, EMBEDDER | {"pooling": "mean"}], EMBEDDER),
    ],
)
def test_the_card_of_workers_that_differ(
    cards: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    given = [ModelCard(**fields) for fields in cards]
    assert merged_card(given) == ModelCard(**expected)
    assert given == [ModelCard(**fields) for fields in cards], "the workers' own cards stay"
