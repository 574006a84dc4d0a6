"""The names of the models that this router serves or should be serving."""

RETIRED_S = 900.0  # as long as an alert says that nobody serves it


class ServedModels:
    """A name is known from the hello of its first decode worker on. It is forgotten `RETIRED_S`
    after the last one left for good; one whose last worker is expected back stays. Pure: time is
    an argument."""

    def __init__(self) -> None:
        self._retired: dict[str, float | None] = {}  # since when, by name; None: it is served

    def __contains__(self, name: str) -> bool:
        return name in self._retired

    def __bool__(self) -> bool:
        return bool(self._retired)

    @property
    def names(self) -> list[str]:
        return sorted(self._retired)

    def joined(self, name: str) -> None:
        """A decode worker of it said hello."""
        self._retired[name] = None

    def left(self, name: str, expected_back: bool, now: float) -> None:
        """The last decode worker of it is gone."""
        self._retired[name] = None if expected_back else now

    def tick(self, now: float) -> None:
        """Forget those whose time is over."""
        for name, since in list(self._retired.items()):
            if since is not None and now - since >= RETIRED_S:
                del self._retired[name]
