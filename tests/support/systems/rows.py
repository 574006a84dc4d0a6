"""A session's tokens as its receiver has them, whether they came in rows or in Tokens."""

from collections.abc import Iterator
from typing import Any

from pdserve.protos.common_pb2 import Tokens
from pdserve.services.common.rpc import RowReader


class SessionEvents:
    """Events of one session, in order: (kind, message); each row is a Tokens."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._reader = RowReader()

    def of(self, event: Any) -> Iterator[tuple[str, Any]]:
        kind = event.WhichOneof("event")
        if kind != "rows":
            yield kind, getattr(event, kind)
            return
        for choice, position, id_ in self._reader.read(event.rows):
            self.num_rows += 1
            yield (
                "tokens",
                Tokens(
                    request=choice.request,
                    attempt=choice.attempt,
                    epoch=choice.epoch,
                    choice=choice.choice,
                    position=position,
                    ids=[id_],
                ),
            )
