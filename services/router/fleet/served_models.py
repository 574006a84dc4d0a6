"""Names of the models that this router serves or should be serving."""

RETIRED_S = 900.0  # as long as an alert reports the model as not served


class ServedModels:
    """The known model names. A name is known from the hello of its first decode worker. It is
    forgotten `RETIRED_S` after the last one left for good, and kept if the last one is expected
    back. Pure: time is an argument."""

    def __init__(self) -> None:
        self._retired: dict[str, float | None] = {}  # time of retirement by name; None: served

    def __contains__(self, name: str) -> bool:
        return name in self._retired

    def __bool__(self) -> bool:
        return bool(self._retired)

    @property
    def names(self) -> list[str]:
        return sorted(self._retired)

    def joined(self, name: str) -> None:
        """Note the hello of a decode worker of the model."""
        self._retired[name] = None

    def left(self, name: str, expected_back: bool, now: float) -> None:
        """Note that the last decode worker of the model is gone."""
        self._retired[name] = None if expected_back else now

    def tick(self, now: float) -> None:
        """Forget names retired for RETIRED_S."""
        for name, since in list(self._retired.items()):
            if since is not None and now - since >= RETIRED_S:
                del self._retired[name]
