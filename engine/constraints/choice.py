"""All that leaves tokens out of one choice, as one bitmask."""

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.constraints.bitmask import Bitmask
from pdserve.engine.constraints.grammars.matcher import GrammarMatcher


class Constraint(Protocol):
    """Says which tokens may come next, as a function of the ids accepted so far."""

    @property
    def param(self) -> str:
        """The request's field."""

    def accept_token(self, token: int) -> None:
        """A token was generated."""

    def bitmask(self) -> Bitmask | None:
        """The tokens that may come next; None: all. Nobody changes the array."""


class ChoiceConstraints:
    """The constraints of one choice; a token must be allowed by each of them."""

    def __init__(self, plain: Sequence[Constraint], grammar: GrammarMatcher | None) -> None:
        self._all: Sequence[Constraint] = plain if grammar is None else (*plain, grammar)
        self.grammar = grammar

    @property
    def param(self) -> str:
        """The field to name when no token is left: the grammar, or else the last constraint."""
        return self._all[-1].param

    def accept_token(self, token: int) -> None:
        for constraint in self._all:
            constraint.accept_token(token)

    def bitmask(self) -> Bitmask | None:
        """The tokens that may come next, None: all; only when the grammar's mask is there."""
        found = [constraint.bitmask() for constraint in self._all]
        masks = [bitmask for bitmask in found if bitmask is not None]
        if not masks:
            return None
        bitmask, *others = masks
        for other in others:
            bitmask = bitmask & other
        return bitmask
