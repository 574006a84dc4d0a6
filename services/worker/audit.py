"""Looks at whether a worker's blocks add up: counts and tells, and never stops serving."""

import logging

log = logging.getLogger(__name__)


class Audit:
    """On one thread."""

    def __init__(self) -> None:
        self.errors = 0  # looks at which they did not
        self._last = ""

    def look(self, discrepancy: str) -> int:
        """Take what does not add up (empty: nothing); says it once. The number of errors so far."""
        if discrepancy:
            self.errors += 1
            if discrepancy != self._last:
                log.error("KV blocks do not add up: %s", discrepancy)
        self._last = discrepancy
        return self.errors
