"""Plans a step that is launched before the tokens of the previous step are known. Pure.

It has the rows of the previous step, except those that certainly end there. If a choice has ended
by an unforeseeable token, StepProgress discards its row.
"""

from pdserve.engine.scheduling.job_table import JobTable
from pdserve.engine.scheduling.plan import Plan, Row
from pdserve.engine.scheduling.step_progress import is_in_batch


def plan_ahead(plan: Plan, jobs: JobTable) -> tuple[Plan, list[int]] | None:
    """Return the step after the launched `plan`, and for each row the index of its pick in `plan`.

    That pick is the row's token. Returns None if planning needs the tokens: something else could
    then run, a row is not a plain decode row, or blocks are short.
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
            assert not copies, "the previous step already writes into that block"
        following.rows.append(Row(sequence, end, end + 1, choices, end))
        picks.append(pick)
    following.num_decode_rows = len(picks)
    return (following, picks) if picks else None


def is_plain(row: Row) -> bool:
    """Whether the row is one token of a choice that needs its next token and nothing else."""
    sequence = row.sequence
    if sequence.is_prefix or len(row.choices) != 1 or row.end - row.start > 1:
        return False
    return sequence.job.is_plain
