"""A ring file: the newest event log records of a process, in a memory-mapped file that survives
SIGKILL (event_log.py defines the record).

    0      magic "PDSVRING", version, vocabulary, capacity, epoch, wall, incarnation, host, role,
           check
    112    position: the sequence of the newest record that is whole
    128    62 reasons of 64 bytes each, a length and UTF-8; a record's detail has a reason's number
    4096   capacity records; sequence s lies in slot s modulo capacity

The kernel keeps what was written to the mapping when the process dies, so nothing is flushed. A
record is written in one copy of 32 bytes, and then the position. So a kill can only tear the record
after the position, which its checksum reveals. A lock on the file shows that its writer is alive.
"""

import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from pdserve.engine.handoff.recorder.event_log import (
    RECORD_BYTES,
    VOCABULARY,
    Recording,
    RecordKind,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

MAGIC = b"PDSVRING"
VERSION = 1
SUFFIX = ".ring"
HEADER_BYTES = 4096
MAX_MB = 32
MAX_DEAD_RINGS = 32  # the newest rings of dead processes that stay in a folder
ID_BYTES = 16
POSITION_AT = 112
REASONS_AT = 128
REASON_BYTES = 64
NUM_REASONS = (HEADER_BYTES - REASONS_AT) // REASON_BYTES
MORE = "(a reason that did not fit into the ring)"
# The machine's reasons come first, so that there is always room for them.
FIRST_REASONS = ("", MORE, "deadline", "peer silent", "peer frozen")

_HEADER = struct.Struct("<8sIIQQQ16s16s16s")
_CHECK = struct.Struct("<I")
_EMPTY = bytes(RECORD_BYTES)


class RingError(Exception):
    """Raised if a file cannot be read as a ring; the message names the file and the reason."""


class Ring:
    """Writes a process's ring file. Any thread may append; one lock orders the records, so that
    their times never decrease.

    Raises OSError if the file cannot be created or its bytes cannot all be allocated at once:
    writing to a page that is missing later would kill the process.
    """

    def __init__(
        self,
        path: Path,
        role: str,
        incarnation: bytes,
        num_bytes: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._capacity = max(1, (num_bytes - HEADER_BYTES) // RECORD_BYTES)
        self._clock = clock
        self._lock = threading.Lock()
        self._sequence = 0
        self._reasons: dict[str, int] = {}
        size = HEADER_BYTES + self._capacity * RECORD_BYTES
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.posix_fallocate(self._file, 0, size)
            self._map = mmap.mmap(self._file, size)
        except OSError:
            os.close(self._file)
            path.unlink()
            raise
        self._epoch = clock()
        identity = (incarnation, host_boot(), role.encode()[:ID_BYTES])
        head = _HEADER.pack(
            MAGIC, VERSION, VOCABULARY, self._capacity, self._epoch, time.time_ns(), *identity
        )
        self._map[: len(head) + _CHECK.size] = head + _CHECK.pack(crc32(head))
        # A cast view stores the eight bytes at once; struct would store them one by one.
        self._view = memoryview(self._map)
        self._position = self._view[POSITION_AT : POSITION_AT + 8].cast("Q")
        for text in FIRST_REASONS:
            self.reason_number(text)

    def append(self, code: int, attempt: bytes, state: int, detail: int, argument: int) -> None:
        with self._lock:
            if self._map.closed:
                return
            sequence = self._sequence = self._sequence + 1
            offset = HEADER_BYTES + sequence % self._capacity * RECORD_BYTES
            time_ns = self._clock() - self._epoch
            self._map[offset : offset + RECORD_BYTES] = pack(
                time_ns, code, attempt, sequence, state, detail, argument
            )
            self._position[0] = sequence

    def reason_number(self, text: str) -> int:
        number = self._reasons.get(text)
        return self._add_reason(text) if number is None else number

    def _add_reason(self, text: str) -> int:
        with self._lock:
            number = self._reasons.get(text, len(self._reasons))
            if number >= NUM_REASONS or self._map.closed:
                return FIRST_REASONS.index(MORE)
            data = text.encode()[: REASON_BYTES - 1].decode(errors="ignore").encode()
            offset = REASONS_AT + number * REASON_BYTES
            self._map[offset : offset + 1 + len(data)] = bytes([len(data)]) + data
            self._reasons[text] = number
            return number

    def close(self) -> None:
        """Record that the process ends in order, and close the file. Later records are dropped."""
        self.append(RecordKind.END, b"", 0, 0, 0)
        with self._lock:
            if not self._map.closed:
                self._position.release()
                self._view.release()
                self._map.close()
                os.close(self._file)


def host_boot() -> bytes:
    """Return the 16-byte id of the running kernel; processes with the same id share a monotonic
    clock."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))[:ID_BYTES]
    except (OSError, ValueError):
        return bytes(ID_BYTES)


def open_ring(folder: str, role: str, incarnation: bytes, megabytes: int) -> Ring | None:
    """Create the ring file of this process in `folder`, which is created if missing, and remove the
    oldest rings of dead processes.

    Return None if `folder` is empty or `megabytes` is 0, and also, with a warning in the log, if
    the file cannot be created.
    """
    if not folder or not megabytes:
        return None
    path = Path(folder) / f"{role}-{incarnation.hex()[:12]}{SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(path.parent)
        ring = Ring(path, role, incarnation, megabytes << 20)
    except OSError as error:
        log.warning("hand-offs are not recorded in %s: %s", path, error.strerror)
        return None
    log.info("hand-offs are recorded in %s", path)
    return ring


def sweep(folder: Path) -> None:
    """Remove the ring files of this user's dead processes from a folder, except the newest
    MAX_DEAD_RINGS."""
    dead: list[tuple[float, Path]] = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(file)
                if status.st_uid == os.getuid():
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    dead.append((status.st_mtime, path))
            finally:
                os.close(file)
    for _, path in sorted(dead)[: max(0, len(dead) - MAX_DEAD_RINGS)]:
        with suppress(OSError):
            path.unlink()


def read_ring(path: Path) -> Recording:
    """Read a ring file, whether its process is alive or dead. Raises RingError."""
    if path.exists() and not path.is_file():
        raise RingError(f"{path}: the path is not a regular file")
    try:
        with path.open("rb") as file:
            data = file.read(HEADER_BYTES + (MAX_MB << 20))
    except OSError as error:
        raise RingError(f"{path}: {error.strerror}") from None
    try:
        return parse_ring(data)
    except RingError as error:
        raise RingError(f"{path}: {error}") from None


def read_rings(paths: Iterable[Path]) -> list[Recording]:
    """Read several ring files as they were at one moment, even while their processes write. Records
    of this host that are newer than the call are left out, so that no record is returned without
    the one that caused it. Raises RingError."""
    now, local_host = time.monotonic_ns(), host_boot()
    recordings = []
    for recording in map(read_ring, paths):
        if recording.host == local_host:
            end_ns = now - recording.epoch_ns
            recording = replace(
                recording, records=[r for r in recording.records if r.time_ns <= end_ns]
            )
        recordings.append(recording)
    return recordings


def parse_ring(data: bytes) -> Recording:
    """Parse the bytes of a ring file; a truncated file gives fewer records. Raises RingError."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise RingError("the file is not a ring of hand-off records")
    head = data[: _HEADER.size]
    _, version, vocabulary, capacity, epoch, wall, incarnation, host, role = _HEADER.unpack(head)
    if crc32(head) != _CHECK.unpack_from(data, _HEADER.size)[0]:
        raise RingError("the ring has a damaged header")
    if not capacity:
        raise RingError("the ring has a capacity of 0 records")
    if version != VERSION or vocabulary != VOCABULARY:
        raise RingError("the ring was written by another version of pdserve")
    position = int.from_bytes(data[POSITION_AT : POSITION_AT + 8], "little")
    records = []
    for offset in range(HEADER_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        slot = data[offset : offset + RECORD_BYTES]
        record = None if slot == _EMPTY else unpack(slot)
        if record is not None:
            # The full sequence is the one with these low bits that is nearest to the position.
            gap = (record.sequence - position + (1 << 31)) % (1 << 32) - (1 << 31)
            sequence = position + gap
            if sequence > 0 and HEADER_BYTES + sequence % capacity * RECORD_BYTES == offset:
                records.append(record._replace(sequence=sequence))
    records.sort(key=lambda record: record.sequence)
    newest = records[-1].sequence if records else 0
    kept_records = [r for r in records if r.sequence > newest - capacity]
    # The slot after the newest record may be torn; it held the oldest record.
    expected = min(max(newest, position), capacity - 1)
    return Recording(
        role=role.rstrip(b"\0").decode("utf-8", "replace"),
        incarnation=incarnation,
        host=host,
        epoch_ns=epoch,
        wall_ns=wall,
        reasons=_reasons(data),
        records=kept_records,
        lost=max(0, newest - capacity),
        damaged=max(0, expected - len(kept_records)),
    )


def _reasons(data: bytes) -> tuple[str, ...]:
    reasons = []
    for number in range(NUM_REASONS):
        offset = REASONS_AT + number * REASON_BYTES
        size = min(data[offset], REASON_BYTES - 1)
        reasons.append(data[offset + 1 : offset + 1 + size].decode("utf-8", "replace"))
    return tuple(reasons)
