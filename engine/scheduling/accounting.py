"""Whether every block is somebody's, exactly once: what pools say, and what jobs hold. Pure.

free + used + cached + reserved == all blocks, in each group; and with `recount` every reference of
every sequence is one that its pool has counted, and no other.
"""

from collections import Counter

from pdserve.engine.kv.block_pool import NULL_BLOCK
from pdserve.engine.scheduling.job_table import JobTable


def discrepancy(roster: JobTable, recount: bool = False) -> str:
    """What does not add up, with the numbers; empty if all does.

    Without `recount` it takes a moment, with it as long as there are blocks in use.
    """
    for group, pool in enumerate(roster.tables.pools):
        counts = pool.counts()
        if counts.total != pool.num_blocks or min(counts.used, counts.reserved) < 0:
            return f"group {group}: {counts} of {pool.num_blocks} blocks"
        if not roster.jobs and (counts.used or counts.reserved):
            return f"group {group}: {counts}, and no request"
        if recount:
            used, reserved = _references(roster, group)
            if (used, reserved) != pool.references():
                return f"group {group}: {counts}; sequences refer to {used} and {reserved}"
    return ""


def _references(roster: JobTable, group: int) -> tuple[Counter[int], Counter[int]]:
    """By block: references of sequences, and of reservations."""
    used, reserved = Counter[int](), Counter[int]()
    for job in roster.jobs.values():
        counted = reserved if job.key in roster.reserved else used
        for sequence in job.sequences:
            counted.update(b for b in sequence.block_tables[group] if b != NULL_BLOCK)
    return used, reserved
