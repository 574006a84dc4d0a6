"""Says which values of the database stand still, because who should change them has died. Pure.

No two clocks are compared: each gateway watches with its own.
"""

from collections.abc import Hashable, Mapping


class Standstill:
    """Remembers when each value was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def unchanged(self, values: Mapping[str, Hashable], for_s: float, now: float) -> set[str]:
        """The names of those that have not changed for so long; `values` are all that there are,
        `now` is in seconds of a clock that never goes back."""
        before, self._seen = self._seen, {}
        for name, value in values.items():
            known, since = before.get(name, (value, now))
            self._seen[name] = value, since if known == value else now
        return {name for name, (_, since) in self._seen.items() if now - since >= for_s}
