"""Grammars that the output must match: each is compiled first in a sandbox process, then on a
thread of the worker; llguidance then matches generated tokens against it."""

from pdserve.engine.constraints.grammars.backend import Compilation, GrammarBackend
from pdserve.engine.constraints.grammars.matcher import (
    CompiledGrammar,
    GrammarError,
    GrammarMatcher,
    GrammarTimeout,
    StepBudget,
)
from pdserve.engine.constraints.grammars.threads import MaskThreads
