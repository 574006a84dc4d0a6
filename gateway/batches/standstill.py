"""Finds values in the database that no longer change because their writer has died. Pure.

It compares no two clocks: each gateway uses its own.
"""

from collections.abc import Hashable, Mapping


class Standstill:
    """Remembers when each value was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def unchanged(self, values: Mapping[str, Hashable], for_s: float, now: float) -> set[str]:
        """The names of values unchanged for `for_s` seconds. `values` must be all values; `now` is
        in seconds of a monotonic clock."""
        previous, self._seen = self._seen, {}
        for name, value in values.items():
            previous_value, since = previous.get(name, (value, now))
            self._seen[name] = value, since if previous_value == value else now
        return {name for name, (_, since) in self._seen.items() if now - since >= for_s}
