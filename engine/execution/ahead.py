"""What a step computes that is launched before the tokens of the one before it are known. Pure.

It has the rows of that step once more, but for those that certainly end with it. A row whose choice
has ended nevertheless, by a token that nobody could know, is computed in vain: StepProgress drops
it.
"""

from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.plan import Plan, Row
from pdserve.engine.scheduling.step_progress import is_in_batch


def plan_ahead(plan: Plan, jobs: JobTable) -> tuple[Plan, list[int]] | None:
    """The step that follows `plan`, which is launched, and for each of its rows the pick of `plan`
    that is its token.

    None if it has to be planned with the tokens known: something else could run then, a row is no
    plain decode row, or blocks are short.
    """
    if plan.num_decode_rows < len(plan.rows) or (jobs.waiting and jobs.num_free_slots):
        return None
    live = [(pick, row) for pick, row in enumerate(plan.rows) if is_in_batch(row)]
    if len(live) < sum(len(job.sequences) for job in jobs.running):
        return None
    if not all(is_plain(row) for _, row in live):
        return None
    following = Plan([])
    picks: list[int] = []
    for pick, (sequence, _, end, choices, _) in live:
        job = sequence.job
        if len(job.generated[choices[0]]) + 1 >= job.max_tokens:
            continue
        if end + 1 > sequence.writable_to:
            copies = jobs.extend(sequence, end + 1)
            if copies is None:
                return None
            assert not copies, "the step before writes into that block already"
        following.rows.append(Row(sequence, end, end + 1, choices, end))
        picks.append(pick)
    following.num_decode_rows = len(picks)
    return (following, picks) if picks else None


def is_plain(row: Row) -> bool:
    """Whether it is one token of a choice that wants its next token and nothing else."""
    sequence = row.sequence
    if sequence.is_prefix or len(row.choices) != 1 or row.end - row.start > 1:
        return False
    return sequence.job.is_plain
