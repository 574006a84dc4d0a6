"""What one step of a request's machine changed, derived from the states before and after it. Pure.

The counters of the router follow from it (Dispatcher.stepped); the machine knows none of them.
"""

from collections import Counter
from dataclasses import dataclass

from pdserve.services.router.request.state import Routing, Stage


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of the machine. Attempts are ids; empty if there is none."""

    before: Routing
    after: Routing

    @property
    def unanswered(self) -> Counter[bytes]:
        """Change of the number of unanswered Admits, by decode worker."""
        change = Counter(self.after.unanswered)
        change.subtract(self.before.unanswered)
        return change

    @property
    def resumed(self) -> bool:
        """Whether an attempt goes on where another session left it."""
        return self.after.num_resumed > self.before.num_resumed

    @property
    def taken(self) -> bytes:
        """The attempt that a decode worker took; its KV identity may differ from before."""
        attempt, stage = self.before.attempt, self.after.stage
        admitted = self.before.stage is Stage.ADMITTING and (
            stage is Stage.PREFILLING or stage is Stage.RUNNING
        )
        if attempt is not None and (admitted or self.resumed):
            return attempt.id
        return self.moved

    @property
    def follows_no_more(self) -> bytes:
        """The attempt whose prompt prefill computes, although it was to wait for another one."""
        attempt = self.before.attempt
        if attempt is None or not attempt.follows or self.before.stage is not Stage.ADMITTING:
            return b""
        return attempt.id if self.after.stage is Stage.PREFILLING else b""

    @property
    def migration_begun(self) -> bool:
        """Whether a migration began."""
        return self.before.migration is None and self.after.migration is not None

    @property
    def migration_over(self) -> bool:
        """Whether a migration ended, at the target or at the source."""
        return self.before.migration is not None and self.after.migration is None

    @property
    def moved(self) -> bytes:
        """The attempt at a migration's target, if the request goes on there."""
        migration, placed = self.before.migration, self.after.placed_attempt
        return placed if migration is not None and migration.is_target(placed) else b""

    @property
    def failed_step(self) -> str:
        """How far a migration got that failed; empty if the request itself left the source."""
        failed = self.after.num_failed_migrations > self.before.num_failed_migrations
        migration = self.before.migration
        return migration.step.value if migration is not None and failed else ""
