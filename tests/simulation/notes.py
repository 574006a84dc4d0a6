"""The hand-off records of a process, in memory: a ring without a file.

A killed process keeps the records it made; a process that ends in order records its end.
"""

from pdserve.engine.handoff.recorder import Recording, RecordKind
from pdserve.engine.handoff.recorder.event_log import Record
from pdserve.engine.handoff.recorder.ring import FIRST_REASONS
from simulation.clock import World

HOST = b"the simulation.."


class Notes:
    """Records of one life of a process, with the world's clock."""

    def __init__(self, world: World, role: str, incarnation: bytes) -> None:
        self._world = world
        self._role, self._incarnation = role, incarnation
        self._records: list[Record] = []
        self._reasons: dict[str, int] = {text: number for number, text in enumerate(FIRST_REASONS)}
        self._closed = False

    def append(self, kind: int, attempt: bytes, state: int, detail: int, argument: int) -> None:
        if not self._closed and not self._world.over:
            at, number = int(self._world.now * 1e9), len(self._records) + 1
            prefix = attempt[:8].ljust(8, b"\0")
            self._records.append(Record(at, int(kind), prefix, number, state, detail, argument))

    def reason_number(self, text: str) -> int:
        return self._reasons.setdefault(text, len(self._reasons))

    def close(self) -> None:
        self.append(RecordKind.END, b"", 0, 0, 0)
        self._closed = True

    def recording(self) -> Recording:
        return Recording(
            role=self._role,
            incarnation=self._incarnation,
            host=HOST,
            epoch_ns=0,
            wall_ns=0,
            reasons=tuple(self._reasons),
            records=self._records,
        )
