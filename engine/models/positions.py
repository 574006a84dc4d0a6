"""Learned positions: embeddings of positions, and of token types, that are added to those of
tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
POSITIONS, TYPES = "model.embed_positions.weight", "model.embed_token_types.weight"


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Embeddings of positions. Token types tell the texts of a pair apart: 0 for a text alone."""

    num_positions: int
    num_types: int = 0  # rows of the embeddings of token types; 0: there are none
    first: int = 0  # row of the stored table that belongs to position 0
    separator: int | None = None  # id of the token that ends the first text of a pair

    def shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors, in the order of loading."""
        shapes = {POSITIONS: (self.first + self.num_positions, hidden_size)}
        if self.num_types:
            shapes[TYPES] = (self.num_types, hidden_size)
        return shapes

    def table(self, vectors: Callable[[str], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return what is added to the embedding of a token, float32 [rows, hidden]: a row for each
        position, or for each type and position. `vectors` returns a tensor by name."""
        positions = vectors(POSITIONS)[self.first :]
        if not self.num_types:
            return positions
        return np.concatenate([positions + one for one in vectors(TYPES)])

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
