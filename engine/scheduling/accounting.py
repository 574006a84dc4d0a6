"""Block accounting: compares the counts of the pools with the jobs that own the blocks. Pure.

In each group free + used + cached + reserved == all blocks. With `recount`, the references that the
pool has counted must also be exactly those of the sequences.
"""

from collections import Counter

from pdserve.engine.kv import NULL_BLOCK
from pdserve.engine.scheduling.job_table import JobTable


def discrepancy(jobs: JobTable, recount: bool = False) -> str:
    """Return what is inconsistent, with the numbers; empty if nothing is.

    Fast without `recount`; with it, the time is proportional to the blocks in use.
    """
    for group, pool in enumerate(jobs.tables.pools):
        counts = pool.counts()
        if counts.total != pool.num_blocks or min(counts.used, counts.reserved) < 0:
            return f"group {group}: {counts} do not add up to {pool.num_blocks} blocks"
        if not jobs.by_key and (counts.used or counts.reserved):
            return f"group {group}: {counts}, but the engine has no requests"
        if recount:
            used, reserved = _references(jobs, group)
            if (used, reserved) != pool.references():
                return (
                    f"group {group}: {counts}; the references of sequences are {used}, of "
                    f"reservations {reserved}"
                )
    return ""


def _references(jobs: JobTable, group: int) -> tuple[Counter[int], Counter[int]]:
    """Return, by block, the references of sequences and those of reservations."""
    used, reserved = Counter[int](), Counter[int]()
    for job in jobs.by_key.values():
        references = reserved if job.key in jobs.reserved else used
        for sequence in job.sequences:
            references.update(b for b in sequence.block_tables[group] if b != NULL_BLOCK)
    return used, reserved
