"""Splits and joins long id lists, so that no message exceeds 256 KiB.

A collector is bounded: a peer cannot make it hold more than its limits.
"""

import logging
from collections.abc import Sequence

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError

log = logging.getLogger(__name__)

IDS_PER_MESSAGE = 32_768  # a varint of a uint32 has at most 5 bytes: 160 KiB


def send_ids(key: str, ids: Sequence[int]) -> tuple[list[pb.IdsPart], Sequence[int]]:
    """The parts to send ahead, in order, and the ids that go into the message itself."""
    split_at = max(0, len(ids) - 1) // IDS_PER_MESSAGE * IDS_PER_MESSAGE
    parts = [
        pb.IdsPart(key=key, ids=ids[start : start + IDS_PER_MESSAGE])
        for start in range(0, split_at, IDS_PER_MESSAGE)
    ]
    return parts, ids[split_at:]


class IdsCollector:
    """Parts received on one stream and not yet taken; one collector per stream.

    A list that exceeds the bounds is never returned in part: `take` refuses it. With too many lists
    at once, refused keys cannot be remembered either, so every later `take` is refused.
    """

    def __init__(self, max_ids: int = 4 << 20, max_keys: int = 1024) -> None:
        self._max_ids = max_ids
        self._max_keys = max_keys
        self._num_ids = 0
        self._flooded = False
        self._parts: dict[str, list[int] | None] = {}  # None: refused

    def add(self, part: pb.IdsPart) -> None:
        """Keep a part. Raises ServiceError(OVERLOADED) if the bounds are exceeded, and from then on
        for its key until that is taken or dropped."""
        if part.key not in self._parts and len(self._parts) >= self._max_keys:
            self._flooded = True
            raise ServiceError(pb.OVERLOADED, "too many requests send token ids in parts")
        ids = self._parts.setdefault(part.key, [])
        if ids is None or self._num_ids + len(part.ids) > self._max_ids or not part.ids:
            self.drop(part.key)
            self._parts[part.key] = None
            raise ServiceError(pb.OVERLOADED, "too many token ids in parts")
        ids.extend(part.ids)
        self._num_ids += len(part.ids)

    def collect(self, part: pb.IdsPart) -> None:
        """Keep a part of a message that is still to come; if it exceeds the bounds, `take`
        raises."""
        try:
            self.add(part)
        except ServiceError as error:
            log.warning("%s", error)

    def take(self, key: str, tail: Sequence[int]) -> list[int]:
        """All ids of `key`, the parts' first and then the message's; forgets the parts.

        Raises ServiceError(OVERLOADED) if a part was refused.
        """
        ids = self._parts.pop(key, [])
        self._num_ids -= len(ids or ())
        if ids is None or self._flooded:
            raise ServiceError(pb.OVERLOADED, "too many token ids in parts")
        return [*ids, *tail]

    def drop(self, key: str) -> None:
        """Forget the parts of `key`."""
        self._num_ids -= len(self._parts.pop(key, None) or ())
