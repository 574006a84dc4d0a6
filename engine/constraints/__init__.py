"""Constraints on which tokens a choice may generate: allowed ids, bad words, a thinking budget, a
grammar (text/structured_output makes grammars from JSON schemas).

Each constraint says which tokens may come next, as a function of the ids that the choice has
generated.
"""

from pdserve.engine.constraints.manager import (
    ConstraintManager,
    RequestConstraints,
    check_constraints,
    has_constraints,
    mask_deadline,
)
from pdserve.engine.constraints.masks import Bitmask
