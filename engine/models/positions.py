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
    num_types: int = 0  # rows of the embeddings of token types; 0: no such embeddings
    # Id of padding in a model that counts the positions of other tokens only. Position 0 is in the
    # row after this id's, and padding has the row of this id.
    padding: int | None = None
    separator: int | None = None  # id of the token that ends the first text of a pair

    @property
    def is_plain(self) -> bool:
        """Whether the stored table has a row for each position, and nothing else is added."""
        return self.padding is None and not self.num_types

    def shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors, in the order of loading."""
        unused = 0 if self.padding is None else self.padding
        shapes = {POSITIONS: (unused + self._rows_per_type, hidden_size)}
        if self.num_types:
            shapes[TYPES] = (self.num_types, hidden_size)
        return shapes

    def table(self, vectors: Callable[[str], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return what is added to the embedding of a token, float32 [rows, hidden]: the row of
        padding if it has one, and a row for each position; all of these for each type. `vectors`
        returns a tensor by name."""
        positions = vectors(POSITIONS)[self.padding or 0 :]
        if not self.num_types:
            return positions
        return np.concatenate([positions + one for one in vectors(TYPES)])

    def rows(self, token_ids: Ints, positions: Ints, starts: Sequence[int]) -> Ints:
        """Return the table's row of each token of a batch, int64 [tokens]. The tokens of a text
        begin at each of `starts`; those after its separator have the next type."""
        rows = positions
        if self.padding is not None:
            is_padding = token_ids == self.padding
            rows = np.where(is_padding, 0, 1 + positions - _number_before(is_padding, starts))
        if self.separator is not None:
            separators = _number_before(token_ids == self.separator, starts)
            rows = rows + self._rows_per_type * np.minimum(separators, self.num_types - 1)
        return rows

    @property
    def _rows_per_type(self) -> int:
        return self.num_positions + (self.padding is not None)


def _number_before(marks: NDArray[np.bool_], starts: Sequence[int]) -> Ints:
    """Return the number of marked tokens before each token in its text, int64 [tokens]."""
    before: Ints = np.cumsum(marks) - marks  # in the batch
    begins = np.array(starts[:-1])
    number: Ints = before - np.repeat(before[begins], np.diff(starts))
    return number
