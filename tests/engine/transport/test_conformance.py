"""Conformance of every transport in the registry to the guarantees that the hand-off needs."""

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from systems.eventually import LIMIT_S, wait_until
from systems.link_ends import (
    SLOT_BYTES,
    Ends,
    Recorder,
    claim_record,
    frame_job,
    make_transport,
    record_of,
    slots_returned,
)
from systems.open_files import open_files

from pdserve.engine.handoff.protocol import PREFIX_BYTES, Prefix, messages
from pdserve.engine.handoff.protocol.frames import MARK_BYTES
from pdserve.engine.transport import (
    SLOTS,
    DeviceSink,
    Frame,
    FrameJob,
    Target,
    TransportOptions,
    TransportRefused,
)
from pdserve.engine.transport.base import transports
from pdserve.engine.transport.unix_socket import dial_unix


@pytest.fixture(params=list(transports()))
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    made = Ends(request.param, tmp_path)
    yield made
    made.close()


def test_bytes_and_order_are_kept(ends: Ends) -> None:
    rng = random.Random(1)
    sizes = [1, 2, 4096, SLOT_BYTES, SLOT_BYTES - 1, *(rng.randrange(1, 90_000) for _ in range(60))]
    sent = [(i, rng.randbytes(size)) for i, size in enumerate(sizes)]
    link = ends.dial(Recorder())
    for sequence, payload in sent:
        link.push(frame_job(payload, sequence))
    wait_until(lambda: len(ends.decode.payloads) == len(sent))
    assert ends.decode.payloads == sent
    assert link.take_busy_s() > 0


def test_a_frame_sent_twice_arrives_twice(ends: Ends) -> None:
    link = ends.dial(Recorder())
    for _ in range(2):
        link.push(frame_job(b"same", 5))
    wait_until(lambda: len(ends.decode.payloads) == 2)
    assert ends.decode.payloads == [(5, b"same")] * 2


def test_control_records_go_both_ways_and_ahead_of_frames(ends: Ends) -> None:
    prefill = Recorder()
    link = ends.dial(prefill)
    wait_until(lambda: len(ends.decode.messages) == 1)
    (decode_link,) = ends.decode.links
    for i in range(100):
        link.post(messages.encode(messages.Gone(bytes([i]) * 16)))
        decode_link.post(messages.encode(messages.Gone(bytes([i]) * 16)))
    expected = [messages.Gone(bytes([i]) * 16) for i in range(100)]
    wait_until(lambda: len(prefill.messages) == 100)
    wait_until(lambda: len(ends.decode.messages) == 101)
    assert prefill.messages == expected
    assert ends.decode.messages[1:] == expected


def test_credit_limits_the_frames_in_flight(ends: Ends) -> None:
    ends.decode.hold()
    link = ends.dial(Recorder())
    built: list[int] = []
    for i in range(3 * SLOTS):
        link.push(counted(frame_job(bytes([i]) * 1000, i), i, built))
    if link.direct:
        wait_until(lambda: len(ends.decode.payloads) == SLOTS)
        link.post(claim_record())  # control records still pass while no slot is free
        wait_until(lambda: len(ends.decode.messages) == 2)
    else:  # one payload is inspected
        wait_until(lambda: len(built) >= SLOTS)
        time.sleep(0.1)  # time for one more, unless it is held back
    assert built == list(range(SLOTS))
    ends.decode.go_on()
    wait_until(lambda: len(ends.decode.payloads) == 3 * SLOTS)
    assert [data[0] for _, data in ends.decode.payloads] == list(range(3 * SLOTS))


def test_credits_of_waiting_frames_share_writes(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.decode.hold()
    link = ends.dial(Recorder())
    wait_until(lambda: len(ends.decode.links) == 1)
    (decode_link,) = ends.decode.links
    given: list[int] = []
    post = decode_link.post

    def seen(data: bytes) -> None:
        if Prefix.unpack(data[:PREFIX_BYTES]).type == messages.Credit.TYPE:
            given.append(len(data))
        post(data)

    monkeypatch.setattr(decode_link, "post", seen)
    returned = slots_returned(monkeypatch)
    sent: list[int] = []
    for i in range(SLOTS):
        link.push(counted(frame_job(bytes([i]) * 1000, i), i, sent, after=True))
    wait_until(lambda: len(sent) == SLOTS, "all on their way")
    ends.decode.go_on()
    wait_until(lambda: returned == [True] * SLOTS, "every credit")
    credit = len(messages.encode(messages.Credit(0, bytes(MARK_BYTES))))
    assert sum(given) == SLOTS * credit
    if link.direct:  # the engine thread credits each slot when done with it
        assert len(given) == SLOTS
    else:
        assert len(given) <= 3
        assert max(given) == SLOTS // 2 * credit


def counted(job: FrameJob, number: int, built: list[int], after: bool = False) -> FrameJob:
    """Wrap a job so that it records its number when it is built, or when its payload was sent."""

    @contextmanager
    def build(slot: int, sink: DeviceSink | None) -> Iterator[Frame | None]:
        if not after:
            built.append(number)
        with job(slot, sink) as frame:
            yield frame
        if after:
            built.append(number)

    return build


def test_unneeded_frames_are_skipped_and_credited(ends: Ends) -> None:
    ends.decode.accept = False
    prefill = Recorder()
    link = ends.dial(prefill)
    for i in range(3 * SLOTS):
        link.push(frame_job(os.urandom(70_000), i))
    link.push(lambda slot, sink: nullcontext())  # a frame whose attempt has ended
    done = threading.Event()
    link.push(lambda slot, sink: nullcontext(done.set()))
    assert done.wait(LIMIT_S)
    assert ends.decode.payloads == []
    assert link.open


def test_the_death_of_a_peer_is_noticed_and_the_next_connection_works(ends: Ends) -> None:
    prefill = Recorder()
    link = ends.dial(prefill)
    link.push(frame_job(b"first", 1))
    wait_until(lambda: len(ends.decode.payloads) == 1)
    ends.decode.links[0].close("decode died")
    wait_until(lambda: len(prefill.reasons) == 1)
    assert not link.open
    link.push(frame_job(b"lost", 2))  # dropped without an error
    again = ends.dial(Recorder())
    again.push(frame_job(b"second", 3))
    wait_until(lambda: len(ends.decode.payloads) == 2)
    again.close()
    wait_until(lambda: len(ends.decode.reasons) == 2)
    assert ends.decode.payloads == [(1, b"first"), (3, b"second")]


def test_a_death_during_transfers_ends_both_sides(ends: Ends) -> None:
    prefill = Recorder()
    ends.decode.hold()
    link = ends.dial(prefill)
    for i in range(4 * SLOTS):
        link.push(frame_job(bytes(SLOT_BYTES), i))
    wait_until(lambda: len(ends.decode.payloads) >= 1)
    link.close()
    ends.decode.go_on()
    wait_until(lambda: len(ends.decode.reasons) == 1)
    assert 1 <= len(ends.decode.payloads) < 4 * SLOTS
    ends.decode.links[0].close()
    assert ends.decode.links[0].ended
    assert len(ends.decode.reasons) == len(prefill.reasons) == 1, (
        "each side must get one close notification"
    )


def test_a_refused_hello_names_its_reason(ends: Ends) -> None:
    ends.decode.refuse = "block size 32 at decode, 16 at prefill"
    with pytest.raises(TransportRefused, match="block size 32 at decode, 16 at prefill"):
        ends.dial(Recorder())


def test_a_frame_before_an_authenticated_claim_closes_the_connection(ends: Ends) -> None:
    prefill = Recorder()
    link = ends.dial(prefill, claim=False)
    link.post(record_of(b"x", 1))
    wait_until(lambda: len(prefill.reasons) == 1)
    wait_until(lambda: len(ends.decode.reasons) == 1)
    assert ends.decode.reasons == ["a frame arrived before a verified Claim"]
    assert ends.decode.payloads == []


def test_garbage_and_silence_close_the_connection_and_take_no_memory(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pdserve.engine.handoff.connection.link.INTRODUCTION_S", 0.2)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"", b"PK\x01\x02\xff\xff\xff\xff"):
        seen = len(ends.decode.reasons)  # read before: the close may be faster
        with raw_socket(ends) as sock:
            sock.sendall(data)
            wait_until(lambda seen=seen: len(ends.decode.reasons) > seen)
    for wire in ends.decode.wires:
        assert not getattr(wire, "_payload_buffer", None), (
            "unauthenticated peers must get no buffer"
        )
    link = ends.dial(Recorder())
    link.push(frame_job(b"still works", 1))
    wait_until(lambda: len(ends.decode.payloads) == 1)


def raw_socket(ends: Ends) -> socket.socket:
    address = ends.listener.address
    if ":" in address:
        host, port = address.rsplit(":", 1)
        return socket.create_connection((host, int(port)))
    return dial_unix(Path(address), 1.0)


def test_without_a_listener_the_dial_is_refused(ends: Ends) -> None:
    ends.listener.close()
    with pytest.raises(TransportRefused):
        ends.transport.dial(ends.target, 1.0)
    with pytest.raises(TransportRefused):
        ends.transport.dial(Target("", b"X" * 16), 1.0)


@pytest.mark.parametrize("name", list(transports()))
def test_close_leaves_no_files_or_threads(name: str, tmp_path: Path) -> None:
    files, threads = open_files(), threading.active_count()
    ends = Ends(name, tmp_path)
    for i in range(5):
        link = ends.dial(Recorder())
        link.push(frame_job(b"x" * 1000, i))
    wait_until(lambda: len(ends.decode.payloads) == 5)
    assert threading.active_count() > threads
    ends.close()
    assert threading.active_count() == threads
    assert open_files() - files == set()
    assert list(tmp_path.iterdir()) == []


def test_shm_works_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    """A socket's name holds 107 bytes, but a folder's path may be longer."""
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    folder.mkdir(parents=True)
    files = open_files()
    ends = Ends("shm", folder)
    assert len(os.fsencode(ends.listener.address)) > 107
    ends.dial(Recorder()).push(frame_job(b"far away", 7))
    wait_until(lambda: len(ends.decode.payloads) == 1)
    assert ends.decode.payloads == [(7, b"far away")]
    ends.close()
    assert not list(folder.iterdir())
    assert open_files() - files == set()
    with pytest.raises(TransportRefused):
        ends.transport.dial(ends.target, 1.0)


@pytest.mark.parametrize("name", ["shm", "cuda_ipc"])
def test_sockets_are_private_to_the_user(name: str, tmp_path: Path) -> None:
    """A folder created for them is private, too."""
    ends = Ends(name, tmp_path / "new")
    (path,) = (tmp_path / "new").iterdir()
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    ends.close()


def test_slots_used_without_credit_close_the_connection(tmp_path: Path) -> None:
    ends = Ends("cuda_ipc", tmp_path)  # other transports credit them at once
    ends.decode.hold()
    link = ends.dial(Recorder())
    link.push(frame_job(b"x", 1))
    wait_until(lambda: len(ends.decode.payloads) == 1)
    link.post(record_of(b"x", 2))
    wait_until(lambda: len(ends.decode.reasons) == 1)
    assert ends.decode.reasons == ["prefill used a slot again without a credit"]
    ends.close()


def test_an_unsealed_memory_window_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends("shm", tmp_path)
    with raw_socket(ends) as sock:
        fd = os.memfd_create("not sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SLOTS * SLOT_BYTES)
        socket.send_fds(sock, [b"K"], [fd])
        os.close(fd)
        wait_until(lambda: len(ends.decode.reasons) == 1)
    assert ends.decode.reasons == ["prefill's shared memory is not sealed"]
    ends.close()


def test_shm_gives_the_reason_of_a_refusal(tmp_path: Path) -> None:
    target = Target("", b"x" * 16)
    with pytest.raises(TransportRefused, match="shm-dir"):
        transports()["shm"](TransportOptions(shm_dir="")).dial(target, 1.0)
    with pytest.raises(TransportRefused, match="No such file"):
        make_transport("shm", tmp_path / "absent").dial(target, 1.0)
