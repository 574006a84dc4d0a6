"""Counts the blocks that decode has promised to prompts whose KV has not arrived yet; pure.

Invariant: a promise pins nothing. It is made only if promised <= free + evictable - growth of the
running sequences (or decode is idle), and released exactly once: at its reservation or at the
attempt's end.
"""

GROWTH_TOKENS = 64  # tokens that a running sequence is expected to need before it ends


def promise_blocks(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Return the blocks of a whole prompt, plus one per choice. A prefix hit does not reduce them,
    since it may be evicted before the Claim."""
    return -(-num_tokens // block_size) + num_choices


class Promises:
    """The sum of all promises; every operation is O(1)."""

    def __init__(self, block_size: int) -> None:
        self._growth = -(-GROWTH_TOKENS // block_size)
        self.blocks = 0

    def offer(self, blocks: int, available: int, running: int) -> bool:
        """Promise `blocks` if they fit beside the existing promises; return False if not.

        `available`: blocks that are free or can be evicted, including those of parked requests.
        `running`: sequences in the batch. An idle decode worker promises whatever fits its whole
        pool, since nothing else competes.
        """
        unpromised = available - self._growth * running - self.blocks
        if blocks > unpromised and (self.blocks or running):
            return False
        self.blocks += blocks
        return True

    def give_back(self, blocks: int) -> None:
        if blocks > self.blocks:
            raise ValueError(f"cannot give back {blocks} blocks: {self.blocks} are promised")
        self.blocks -= blocks
