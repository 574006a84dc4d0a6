"""Settings of an encoder, whose attention sees later tokens too, and the learned embeddings of
positions and token types that it adds to those of tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
POSITIONS, TYPES = "model.position_embeddings.weight", "model.token_type_embeddings.weight"
EMBEDDING_NORM = "model.embedding_norm"


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Embeddings of positions, and of token types, which tell the texts of a pair apart: 0 for a
    text alone."""

    num_positions: int
    num_types: int
    first: int = 0  # row of the stored table that belongs to position 0
    separator: int | None = None  # id of the token that ends the first text of a pair

    def shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors, in the order of loading."""
        return {
            POSITIONS: (self.first + self.num_positions, hidden_size),
            TYPES: (self.num_types, hidden_size),
        }

    def table(self, vectors: Callable[[str], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return what is added to the embedding of a token, float32 [types * positions, hidden].
        `vectors` returns a tensor by name."""
        positions, types = vectors(POSITIONS)[self.first :], vectors(TYPES)
        return np.concatenate([positions + one for one in types])

    def rows(self, token_ids: Ints, positions: Ints, starts: Sequence[int]) -> Ints:
        """Return the table's row of each token of a batch, int64 [tokens]. The tokens of a text
        begin at each of `starts`; those behind its separator have the next type."""
        if self.separator is None:
            return positions
        ends = (token_ids == self.separator).astype(np.int64)
        before = np.cumsum(ends) - ends  # separators of the batch before each token
        begins = np.array(starts[:-1])
        own = before - np.repeat(before[begins], np.diff(starts))
        rows: Ints = positions + self.num_positions * np.minimum(own, self.num_types - 1)
        return rows


@dataclass(frozen=True, slots=True)
class Encoder:
    """In what an encoder differs from a decoder, besides that its attention sees later tokens: the
    first layer begins with a norm of the embeddings, which replaces the residual stream."""

    positions: LearnedPositions | None = None  # None: rope
    post_norm: bool = False  # every norm replaces the residual stream
