"""Combines all constraints of one choice into one bitmask."""

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.constraints.bitmask import Bitmask
from pdserve.engine.constraints.grammars.matcher import GrammarMatcher


class Constraint(Protocol):
    """Rule for which tokens may come next, as a function of the ids accepted so far."""

    @property
    def param(self) -> str:
        """The request field of the constraint."""

    def accept_token(self, token: int) -> None:
        """Record a generated token."""

    def bitmask(self) -> Bitmask | None:
        """Return the tokens that may come next; None: all. Callers must not change the array."""


class ChoiceConstraints:
    """The constraints of one choice; each of them must allow a token."""

    def __init__(self, plain: Sequence[Constraint], grammar: GrammarMatcher | None) -> None:
        self._all: Sequence[Constraint] = plain if grammar is None else (*plain, grammar)
        self.grammar = grammar

    @property
    def param(self) -> str:
        """Field to name when no token is allowed: the grammar, or else the last constraint."""
        return self._all[-1].param

    def accept_token(self, token: int) -> None:
        for constraint in self._all:
            constraint.accept_token(token)

    def bitmask(self) -> Bitmask | None:
        """Return the tokens that may come next; None: all. The grammar's mask must be ready."""
        bitmasks = [constraint.bitmask() for constraint in self._all]
        masks = [bitmask for bitmask in bitmasks if bitmask is not None]
        if not masks:
            return None
        bitmask, *others = masks
        for other in others:
            bitmask = bitmask & other
        return bitmask
