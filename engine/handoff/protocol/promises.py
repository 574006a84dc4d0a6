"""Counts the blocks that decode has promised to prompts whose KV has not come yet; pure.

Invariant: a promise pins nothing. It is given only if promised <= free + evictable - growth of
the running, and every promise is given back exactly once: at its reservation or at its end.
"""

GROWTH_TOKENS = 64  # what a running sequence is expected to need before it ends


def promise_blocks(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Blocks of a whole prompt, plus one per choice. A prefix hit does not count, since it may be
    evicted before the Claim."""
    return -(-num_tokens // block_size) + num_choices


class Promises:
    """The sum of the promises; every operation is O(1)."""

    def __init__(self, block_size: int) -> None:
        self._growth = -(-GROWTH_TOKENS // block_size)
        self.blocks = 0

    def offer(self, blocks: int, available: int, running: int) -> bool:
        """Promises `blocks` if they fit beside what is promised already; False if not.

        `available`: blocks that are free or can be evicted, those of parked requests included.
        `running`: sequences in the batch. An idle decode promises whatever fits its pool at all,
        since nothing else competes.
        """
        room = available - self._growth * running - self.blocks
        if blocks > room and (self.blocks or running):
            return False
        self.blocks += blocks
        return True

    def give_back(self, blocks: int) -> None:
        if blocks > self.blocks:
            raise ValueError(f"gave back {blocks} blocks of {self.blocks} promised")
        self.blocks -= blocks
