"""Adds the hidden states of a step to the outcomes of rows that are pooled."""

from collections.abc import Sequence as Seq
from typing import Any

from pdserve.engine.execution.runner import Model
from pdserve.engine.scheduling.plan import Outcome, Row


def with_states(
    rows: Seq[Row], outcomes: list[Outcome], hidden: Any, model: Model
) -> list[Outcome]:
    """Return the outcomes, those of pooled rows with the states of their outputs.

    `hidden`: [outputs, hidden], the outputs of row after row; None without outputs.
    """
    if hidden is None or not any(row.sequence.job.pooled for row in rows):
        return outcomes
    pooled, output = list(outcomes), 0
    for i, row in enumerate(rows):
        end = output + row.end - row.first_output
        if row.sequence.job.pooled is not None and end > output:
            pooled[i] = outcomes[i]._replace(states=model.states(hidden[output:end]))
        output = end
    return pooled
