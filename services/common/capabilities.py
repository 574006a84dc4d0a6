"""What a model does, according to its card: generate text, embed, score pairs of texts. Pure.

Only this module reads the card's fields `pooling`, `pool`, `scores_pairs` and `score_token_ids` to
tell its task.
"""

from collections.abc import Sequence
from enum import Enum

from pdserve.protos.common_pb2 import ModelCard

SCORE = "score"  # Start.pooling of a pair of texts that a model's head scores


class Scoring(Enum):
    """How a model scores a pair of texts."""

    HEAD = "head"  # a classification head reads the pair
    ANSWER = "answer"  # it answers yes or no
    SIMILARITY = "similarity"  # of the two embeddings


def only_pools(card: ModelCard) -> bool:
    """Return whether the model only embeds or scores with a head, so that it computes no token
    after a prompt."""
    return bool(card.pooling or card.scores_pairs)


def generates(card: ModelCard) -> bool:
    """Return whether the model generates text."""
    return not (only_pools(card) or card.score_token_ids)


def pooling_of(card: ModelCard) -> str:
    """Return what the model makes of the states of a prompt, as Start.pooling names it: a kind of
    pooling, or SCORE; empty if it does neither."""
    return SCORE if card.scores_pairs else card.pooling or card.pool


def embeds(card: ModelCard) -> bool:
    """Return whether the model computes embeddings."""
    return pooling_of(card) not in ("", SCORE)


def scoring_of(card: ModelCard) -> Scoring | None:
    """Return how the model scores pairs of texts, or None if it cannot."""
    if card.scores_pairs:
        return Scoring.HEAD
    if card.score_token_ids:
        return Scoring.ANSWER
    return Scoring.SIMILARITY if embeds(card) else None


def merged_card(cards: Sequence[ModelCard]) -> ModelCard:
    """Return the card of a model name, from the cards of its workers, which share one tokenizer.

    It is the first card whose model generates, otherwise the first. If any worker of a generating
    model embeds, the model does, by the first pooling in alphabetical order.
    """
    first = next(filter(generates, cards), cards[0])
    embedder = min(filter(embeds, cards), key=pooling_of, default=None)
    if embedder is None or not generates(first):
        return first
    card = ModelCard()
    card.CopyFrom(first)
    card.pool = pooling_of(embedder)
    card.normalizes, card.hidden_size = embedder.normalizes, embedder.hidden_size
    return card
