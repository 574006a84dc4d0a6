"""All that leaves tokens out of one choice, as one set of tokens."""

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.constraints.bitmask import Words
from pdserve.engine.constraints.grammars.follower import GrammarFollower


class Constraint(Protocol):
    """Says which tokens may come next, as a function of the ids pushed so far."""

    @property
    def param(self) -> str:
        """The request's field."""

    def push(self, token: int) -> None:
        """A token was generated."""

    def allowed(self) -> Words | None:
        """The tokens that may come next; None: all. Nobody changes the array."""


class ChoiceConstraints:
    """The constraints of one choice; a token must be allowed by each of them."""

    def __init__(self, plain: Sequence[Constraint], grammar: GrammarFollower | None) -> None:
        self._plain = plain
        self.grammar = grammar

    @property
    def param(self) -> str:
        """The field to name when no token is left: the grammar, or else the last constraint."""
        return self.grammar.param if self.grammar is not None else self._plain[-1].param

    def push(self, token: int) -> bool:
        """Whether nothing may follow this token, so that the choice has ended."""
        for constraint in self._plain:
            constraint.push(token)
        if self.grammar is None:
            return False
        self.grammar.push(token)
        return self.grammar.stopped

    def mask(self) -> Words | None:
        """What may come next; only when the grammar's mask is there."""
        found = [constraint.allowed() for constraint in self._plain]
        if self.grammar is not None:
            found.append(self.grammar.allowed())
        masks = [words for words in found if words is not None]
        if not masks:
            return None
        words, *others = masks
        for other in others:
            words = words & other
        return words
