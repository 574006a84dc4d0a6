"""Grammars: compiled first in a sandbox, then on threads, and matched by llguidance."""

from pdserve.engine.constraints.grammars.backend import Compilation, GrammarBackend
from pdserve.engine.constraints.grammars.matcher import (
    CompiledGrammar,
    GrammarError,
    GrammarMatcher,
    StepBudget,
)
from pdserve.engine.constraints.grammars.threads import MaskThreads
