"""Rings: records survive a SIGKILL, and no file makes the reader fail."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.rings import assert_conform, whole_handoff

from pdserve.engine.handoff.protocol import Action, Handoff, HandoffEnded, Side, step
from pdserve.engine.handoff.recorder import (
    EventLog,
    Recording,
    RecordKind,
    RingError,
    check,
    open_ring,
    read_rings,
)
from pdserve.engine.handoff.recorder import ring as ring_file
from pdserve.engine.handoff.recorder.event_log import (
    ACTIONS,
    EVENTS,
    PHASES,
    RECORD_BYTES,
    SIDES,
    Record,
    pack,
    unpack,
)
from pdserve.engine.handoff.recorder.ring import (
    HEADER_BYTES,
    MAX_DEAD_RINGS,
    MORE,
    NUM_REASONS,
    POSITION_AT,
    Ring,
    parse_ring,
    read_ring,
    sweep,
)

INCARNATION = bytes(range(16))
ATTEMPT = bytes(range(100, 116))
RECORDS = st.builds(
    Record,
    time_ns=st.integers(0, (1 << 56) - 1),
    code=st.sampled_from([*range(len(EVENTS)), *RecordKind]),
    attempt=st.binary(min_size=8, max_size=8),
    sequence=st.integers(0, (1 << 32) - 1),
    state=st.builds(
        lambda side, before, after: side << 12 | before << 6 | after,
        st.integers(0, len(SIDES) - 1),
        st.integers(0, len(PHASES) - 1),
        st.integers(0, len(PHASES) - 1),
    ),
    detail=st.integers(0, (1 << 16) - 1),
    argument=st.integers(0, (1 << 32) - 1),
)


def make(folder: Path, num_records: int = 100, **options: object) -> Ring:
    size = HEADER_BYTES + num_records * RECORD_BYTES
    return Ring(folder / "a.ring", "decode", INCARNATION, size, **options)  # type: ignore[arg-type]


def fill(ring: Ring, number: int, first: int = 0) -> None:
    for argument in range(first, first + number):
        ring.append(RecordKind.SENT, ATTEMPT, 0, 7, argument)


def arguments_of(recording: Recording) -> list[int]:
    return [record.argument for record in recording.records]


def test_all_codes_fit_into_a_record() -> None:
    assert len(EVENTS) <= RecordKind.OPENED
    assert len(PHASES) <= 64
    assert len(ACTIONS) <= 32
    assert len(SIDES) <= 16


@given(RECORDS)
def test_a_record_round_trips(record: Record) -> None:
    data = pack(*record)
    assert len(data) == RECORD_BYTES
    assert unpack(data) == record


@given(RECORDS, st.integers(0, RECORD_BYTES - 1), st.integers(1, 255))
def test_a_damaged_record_is_ignored(record: Record, at: int, mask: int) -> None:
    data = bytearray(pack(*record))
    data[at] ^= mask
    assert unpack(bytes(data)) is None


@given(RECORDS, RECORDS, st.integers(1, RECORD_BYTES - 1))
def test_a_torn_record_is_ignored(old: Record, new: Record, done: int) -> None:
    whole = pack(*new)
    torn = whole[:done] + pack(*old)[done:]
    assert unpack(torn) in (None, new, old)
    assert unpack(whole[:done]) is None


def test_written_records_are_read(tmp_path: Path) -> None:
    ring = make(tmp_path)
    fill(ring, 30)
    live = read_ring(tmp_path / "a.ring")
    ring.close()
    fill(ring, 5)  # dropped, since the ring is closed
    found = read_ring(tmp_path / "a.ring")
    assert (found.role, found.incarnation, found.name) == ("decode", INCARNATION, "decode-000102")
    assert [r.argument for r in live.records] == list(range(30))
    assert found.records[:-1] == live.records
    assert found.records[-1].kind is RecordKind.END
    assert (found.lost, found.damaged) == (0, 0)
    assert found.records[0].attempt == ATTEMPT[:8]
    assert [r.sequence for r in found.records] == list(range(1, 32))
    times = [r.time_ns for r in found.records]
    assert times == sorted(times)


def test_the_newest_records_are_kept(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for number in (100, 101, 170, 1000):
        with subtests.test(number=number):
            tmp_path = tmp_path_factory.mktemp("case")
            fill(make(tmp_path), number)
            found = read_ring(tmp_path / "a.ring")
            assert [r.argument for r in found.records] == list(range(number - 100, number))
            assert (found.lost, found.damaged) == (number - 100, 0)


def test_sequence_numbers_exceed_32_bits(tmp_path: Path) -> None:
    ring = make(tmp_path)
    ring._sequence = (1 << 32) - 20
    fill(ring, 150)
    found = read_ring(tmp_path / "a.ring")
    assert [r.argument for r in found.records] == list(range(50, 150))
    assert found.records[-1].sequence == (1 << 32) + 130


def test_a_torn_last_record_affects_no_other(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for before, done in product((5, 250), range(1, RECORD_BYTES)):
        with subtests.test(before=before, done=done):
            tmp_path = tmp_path_factory.mktemp("case")
            fill(make(tmp_path), before)
            data = bytearray((tmp_path / "a.ring").read_bytes())
            at = HEADER_BYTES + (before + 1) % 100 * RECORD_BYTES
            data[at : at + done] = pack(1, RecordKind.LATE, ATTEMPT, before + 1, 0, 7, 99999)[:done]
            found = parse_ring(bytes(data))
            kept = range(max(0, before - 99), before)
            assert [r.argument for r in found.records] == list(kept)
            assert found.damaged == 0


def test_threads_append_in_a_single_order(tmp_path: Path) -> None:
    ring = make(tmp_path, 5000)
    threads = [threading.Thread(target=fill, args=(ring, 1000, n * 1000)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_ring(tmp_path / "a.ring")
    assert sorted(r.argument for r in found.records) == list(range(4000))
    assert [r.sequence for r in found.records] == list(range(1, 4001))
    times = [r.time_ns for r in found.records]
    assert times == sorted(times)
    for n in range(4):
        own = [r.argument for r in found.records if r.argument // 1000 == n]
        assert own == sorted(own)


def test_reasons_are_stored_as_text(tmp_path: Path) -> None:
    ring = make(tmp_path, 1000)
    trace, state = EventLog(ring), Handoff(Side.SEND, 1.0)
    reasons = [f"peer {n}: " + "é" * 60 for n in range(2 * NUM_REASONS)]
    for reason in ("deadline", *reasons, "deadline"):
        event = HandoffEnded(reason, peer_notified=True)
        after, actions = step(state, event, 0.0)
        trace.step(ATTEMPT, event, state, after, actions)
    found = read_ring(tmp_path / "a.ring")
    words = [found.reason(record.detail) for record in found.records]
    assert words[0] == words[-1] == "deadline", "the machine's reasons must always fit"
    room = NUM_REASONS - 5
    assert all(w and r.startswith(w) for w, r in zip(words[1:room], reasons, strict=False))
    assert set(words[room + 1 : -1]) == {MORE}
    assert found.records[0].actions == (Action.LEAVE_QUEUE, Action.REPORT_LOST)


KILLED = """
import sys, threading
from pathlib import Path
from pdserve.engine.handoff.recorder.ring import Ring
from pdserve.engine.handoff.recorder.event_log import RecordKind
ring = Ring(Path(sys.argv[1]), "decode", bytes(16), 4096 + int(sys.argv[2]) * 32)
def write(side):
    number = 0
    while True:
        ring.append(RecordKind.SENT, bytes(8), side << 12, 7, number)
        number += 1
threading.Thread(target=write, args=(1,), daemon=True).start()
threading.Thread(target=lambda: print("go", flush=True)).start()
write(0)
"""


@pytest.mark.parametrize("capacity", [300, 30_000])
def test_records_of_a_killed_process_are_kept(tmp_path: Path, capacity: int) -> None:
    """The process is killed while two threads append. This is repeated because it depends on chance
    which record is torn."""
    wrapped = 0
    for life in range(5):
        path = tmp_path / f"{life}.ring"
        words = [sys.executable, "-c", KILLED, str(path), str(capacity)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            while len(read_ring(path).records) < 200:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        data = path.read_bytes()
        position = int.from_bytes(data[POSITION_AT : POSITION_AT + 8], "little")
        found = parse_ring(data)
        numbers = [record.sequence for record in found.records]
        assert found.damaged == 0
        assert numbers[-1] in (position, position + 1), (
            "at most one record may follow the counted ones"
        )
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert len(numbers) >= min(position, capacity - 1)
        for side in (0, 1):
            own = [r.argument for r in found.records if r.state >> 12 == side]
            assert own == list(range(min(own, default=0), min(own, default=0) + len(own)))
        wrapped += found.lost > 0
    assert (capacity > 300) or wrapped == 5


def test_a_full_disk_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring_file.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        make(tmp_path)
    assert open_ring(str(tmp_path), "decode", INCARNATION, 1) is None, (
        "a worker can serve without a ring"
    )
    path = tmp_path / "decode-000102030405.ring"
    assert f"hand-offs are not recorded in {path}: No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_or_a_size_there_is_no_ring(tmp_path: Path) -> None:
    assert open_ring("", "decode", INCARNATION, 1) is None
    assert open_ring(str(tmp_path), "decode", INCARNATION, 0) is None
    made = open_ring(str(tmp_path / "new"), "decode", INCARNATION, 1)
    assert made is not None
    made.close()
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "decode-000102030405.ring"
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    assert path.stat().st_size <= 1 << 20


def test_the_newest_rings_of_dead_processes_are_kept(tmp_path: Path) -> None:
    alive = open_ring(str(tmp_path), "decode", bytes(16), 1)
    for number in range(MAX_DEAD_RINGS + 3):
        path = tmp_path / f"dead-{number}.ring"
        path.touch()
        os.utime(path, (number, number))
    (tmp_path / "other.txt").touch()
    os.utime(tmp_path / f"decode-{'0' * 12}.ring", (0, 0))
    sweep(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        *(f"dead-{number}.ring" for number in range(3, MAX_DEAD_RINGS + 3)),
        f"decode-{'0' * 12}.ring",
        "other.txt",
    }
    assert alive is not None
    alive.close()


def whole_ring(folder: Path) -> bytes:
    """Return a ring with decode's records of a hand-off."""
    _, decode, _ = whole_handoff(ATTEMPT)
    times = count(1000)
    ring = make(folder, 50, clock=lambda: next(times))
    for record in decode.records:
        ring.append(record.code, record.attempt, record.state, record.detail, record.argument)
    ring.close()
    return (folder / "a.ring").read_bytes()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return whole_ring(tmp_path_factory.mktemp("good"))


read: dict[str, int] = {"refused": 0, "read": 0, "damaged": 0}


@settings(max_examples=600)
@given(data=st.data())
def test_no_file_makes_the_reader_fail(good: bytes, data: st.DataObject) -> None:
    """The file is truncated, then overwritten at some places; the checker accepts what the reader
    returns."""
    sizes = st.one_of(st.just(len(good)), st.integers(0, len(good)))
    broken = bytearray(good[: data.draw(sizes)])
    spots = st.one_of(st.integers(0, 130), st.integers(POSITION_AT, len(good)))
    for at in data.draw(st.lists(spots, max_size=4)):
        new = data.draw(st.binary(min_size=1, max_size=40))
        if at < len(broken):
            broken[at : at + len(new)] = new[: len(broken) - at]
    try:
        found = parse_ring(bytes(broken))
    except RingError as error:
        read["refused"] += len(str(error)) < 100
        return
    read["read"] += 1
    read["damaged"] += found.damaged > 0
    assert len(found.records) <= 50
    assert found.damaged <= 50
    for violation in check([found]):
        assert str(violation)


def test_every_kind_of_damage_occurred() -> None:
    """Checks the counts of the test above."""
    print(read)
    assert min(read.values()) > 20


def test_a_header_of_another_version_is_refused(subtests: pytest.Subtests, good: bytes) -> None:
    for offset in (8, 12, 16, 24):
        with subtests.test(offset=offset):
            data = bytearray(good)
            data[offset] ^= 1
            with pytest.raises(RingError, match="damaged header"):
                parse_ring(bytes(data))
            head = bytes(data[: ring_file._HEADER.size])
            data[len(head) : len(head) + 4] = ring_file._CHECK.pack(ring_file.crc32(head))
            if offset < 16:
                with pytest.raises(RingError, match="another version"):
                    parse_ring(bytes(data))


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(RingError, match=r"nowhere.ring: No such file"):
        read_ring(tmp_path / "nowhere.ring")
    with pytest.raises(RingError, match="not a regular file"):
        read_ring(tmp_path)
    (tmp_path / "text.ring").write_text("hello\n" * 1000)
    with pytest.raises(RingError, match=r"text.ring: the file is not a ring"):
        read_ring(tmp_path / "text.ring")


def test_several_rings_are_read_as_of_the_same_moment(tmp_path: Path) -> None:
    """A process keeps writing while another's ring is read."""
    made = [open_ring(str(tmp_path), role, role.encode() * 4, 1) for role in ("decode", "router")]
    paths = sorted(tmp_path.iterdir())

    def meanwhile() -> Iterator[Path]:
        for ring, path in zip(made, paths, strict=True):
            assert ring is not None
            fill(ring, 3)
            yield path

    for ring in made:
        assert ring is not None
        fill(ring, 2)
    found = read_rings(meanwhile())
    assert [arguments_of(recording) for recording in found] == [[0, 1], [0, 1]]
    assert [len(read_ring(path).records) for path in paths] == [5, 5]
    for ring in made:
        assert ring is not None
        ring.close()


def test_the_rings_of_a_folder_conform(tmp_path: Path) -> None:
    whole_ring(tmp_path)
    assert assert_conform(tmp_path)["receive", "filled"] == 1
