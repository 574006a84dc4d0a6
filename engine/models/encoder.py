"""Settings of an encoder, whose attention sees later tokens too, and the learned embeddings of
positions and token types that it adds to those of tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POSITIONS, TYPES = "model.position_embeddings.weight", "model.token_type_embeddings.weight"
EMBEDDING_NORM = "model.embedding_norm"


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Embeddings of positions, and of token types, which tell the texts of a pair apart: 0 for a
    text alone."""

    num_positions: int
    num_types: int
    first: int = 0  # row of the stored table that belongs to position 0

    def shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors, in the order of loading."""
        return {
            POSITIONS: (self.first + self.num_positions, hidden_size),
            TYPES: (self.num_types, hidden_size),
        }

    def table(self, vectors: Callable[[str], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return what is added to the embedding of a token, float32 [positions, hidden].
        `vectors` returns a tensor by name."""
        positions = vectors(POSITIONS)[self.first :]
        return positions + vectors(TYPES)[0]


@dataclass(frozen=True, slots=True)
class Encoder:
    """In what an encoder differs from a decoder, besides that its attention sees later tokens: the
    first layer begins with a norm of the embeddings, which replaces the residual stream."""

    positions: LearnedPositions | None = None  # None: rope
    post_norm: bool = False  # every norm replaces the residual stream
