"""Decides how long the lines of a batch wait for a model that no worker serves.

Routers do not know the models that workers still load, and a fleet serves its small models first,
so an absent model may still appear. A line waits for it
- to the end of the window, if the key had responses from it in the last day;
- for STARTING_S after the gateway began, when workers may have been started with it;
- for MODEL_WAIT_S in any case.
"""

from collections.abc import Awaitable, Callable

MODEL_WAIT_S = 30.0
STARTING_S = 900.0
MAX_MODELS = 1000  # per batch that are waited for; more names than a fleet has are typing errors
MAX_NAME = 512  # characters of a name that are compared

WasUsed = Callable[[str, str], Awaitable[bool]]
"""Whether a tenant (its id in hexadecimal) has had answers of a model in the last day."""


class AbsentModels:
    """The models that lines of one batch wanted and that were absent."""

    def __init__(self, tenant: str, was_used: WasUsed, starting_until: float) -> None:
        """`starting_until` is in seconds on the clock of `gives_up`."""
        self._tenant = tenant
        self._was_used = was_used
        self._starting_until = starting_until
        self._since: dict[str, float] = {}
        self._given_up: set[str] = set()

    def found(self, model: str) -> None:
        """Record that the model was there."""
        self._since.pop(model, None)
        self._given_up.discard(model)

    async def gives_up(self, model: str, now: float) -> bool:
        """Whether a line that did not find the model takes that as its result. Raises ServiceError
        if the database cannot be used."""
        if model in self._given_up:
            return True
        if len(self._since) < MAX_MODELS:
            self._since.setdefault(model, now)
        since = self._since.get(model)
        if since is not None:
            if now < max(since + MODEL_WAIT_S, self._starting_until):
                return False
            if await self._was_used(self._tenant, model):
                return False
            self._given_up.add(model)
        return True
