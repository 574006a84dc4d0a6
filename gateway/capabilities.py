"""What a model can do besides or instead of generating text, according to its card."""

from enum import Enum

from pdserve.engine.api import RANK
from pdserve.protos.common_pb2 import ModelCard


class Scoring(Enum):
    """How a model scores a pair of texts."""

    HEAD = "head"  # a classification head reads the pair
    ANSWER = "answer"  # it answers yes or no
    SIMILARITY = "similarity"  # of the two embeddings


def generates(card: ModelCard) -> bool:
    """Return whether the model generates text."""
    return not (card.pooling or card.score_token_ids)


def pooling_of(card: ModelCard) -> str:
    """Return how the model pools the states of a prompt, as Start.pooling names it; empty if it
    does not."""
    return card.pooling or card.pool


def embeds(card: ModelCard) -> bool:
    """Return whether the model computes embeddings."""
    return pooling_of(card) not in ("", RANK)


def scoring_of(card: ModelCard) -> Scoring | None:
    """Return how the model scores pairs of texts, or None if it cannot."""
    if card.pooling == RANK:
        return Scoring.HEAD
    if card.score_token_ids:
        return Scoring.ANSWER
    return Scoring.SIMILARITY if embeds(card) else None
