"""Every reason for which cuda_ipc refuses a connection, by name, at both ends; a transport
requested by name is never replaced."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.device import UUID, FakeDevice, FakeSignal, array_at
from systems.eventually import LIMIT_S, wait_until
from systems.link_ends import HELLO, INCARNATION, SLOT_BYTES, Ends, Recorder
from systems.open_files import open_files

from pdserve.engine.handoff.connection import Dialer, usable
from pdserve.engine.transport import (
    SLOTS,
    DeviceError,
    KvTransport,
    Target,
    TransportOptions,
    TransportRefused,
    make_transports,
)
from pdserve.engine.transport.cuda_ipc import wires
from pdserve.engine.transport.cuda_ipc.handshake import MAX_PROBES, REASONS, Probes, ProcessPlace
from pdserve.engine.transport.cuda_ipc.transport import CudaIpcTransport, make_window
from pdserve.engine.transport.device import Slot
from pdserve.engine.transport.unix_socket import dial_unix

OTHER = b"fake GPU number 1"[:15] + b"1"


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends("cuda_ipc", tmp_path)
    yield made
    made.close()


class ClosingDialer(Dialer):
    """A Dialer that owns its transports."""

    def __init__(self, transports: list[KvTransport]) -> None:
        super().__init__(transports, Recorder())
        self._owned = transports

    def close(self) -> None:
        for transport in self._owned:
            transport.close()


def dialer(
    folder: Path, device: Callable[[], FakeDevice], choice: str = "cuda_ipc"
) -> ClosingDialer:
    options = TransportOptions("", str(folder), SLOT_BYTES, device, SLOT_BYTES)
    return ClosingDialer(make_transports(choice, options))


def refused(
    reason: str,
    text: str,
    ends: Ends,
    folder: Path,
    device: FakeDevice,
    caplog: pytest.LogCaptureFixture,
    at_decode: bool = True,
) -> None:
    """Check that both ends log the reason, that it is counted, and that nothing remains of the
    connection."""
    assert reason in REASONS
    dial = dialer(folder, lambda: device)
    with caplog.at_level("INFO"):
        with pytest.raises(TransportRefused, match=f"^cuda_ipc: {reason}: .*{text}"):
            dial.dial(ends.target, HELLO)
        wait_until(lambda: len(ends.decode.reasons) == len(ends.decode.links))
    assert dial.refusals == {"cuda_ipc": 1}
    said = [r for r in caplog.records if reason in r.getMessage()]
    assert any("connection.connect" in r.name for r in said), "prefill did not log the reason"
    if at_decode:
        assert any("cuda_ipc.wires" in r.name for r in said), "decode did not log the reason"
        assert reason in ends.decode.reasons[-1]
    assert ends.decode.messages == []
    dial.close()


def test_another_gpu(ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused("other_gpu", "not visible to this process", ends, tmp_path, FakeDevice(OTHER), caplog)


def test_no_peer_access(ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(OTHER)
    device.peers[UUID] = ("no_peer_access", "GPU 1 cannot access GPU 0")
    refused("no_peer_access", "cannot access GPU 0", ends, tmp_path, device, caplog)


def test_a_gpu_with_peer_access_is_used(ends: Ends, tmp_path: Path) -> None:
    device = FakeDevice(OTHER)
    device.peers[UUID] = None
    dial = dialer(tmp_path, lambda: device)
    link = dial.dial(ends.target, replace(HELLO, transport="cuda_ipc"))
    assert device.num["out"] == 1, "the 4 KiB"
    link.close()
    dial.close()


@pytest.mark.parametrize("name", ["pid_namespace", "ipc_namespace"])
def test_another_pid_or_ipc_namespace(
    ends: Ends,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    here = wires.local_place

    def elsewhere(device: FakeDevice) -> ProcessPlace:
        place = here(device)  # type: ignore[arg-type]
        return replace(place, **{name: (4, 4026539999)}) if device is prefill else place

    prefill = FakeDevice()
    monkeypatch.setattr(wires, "local_place", elsewhere)
    text = f"{name[:3].upper()} namespace [0-9]+ at decode, 4026539999 at prefill"
    refused(name, text, ends, tmp_path, prefill, caplog)


def test_a_process_that_is_not_visible(
    ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a peer outside this PID namespace, SO_PEERCRED gives pid 0."""

    class Outside(wires.PeerProcess):
        def __init__(self, sock: socket.socket, said: int | None = None) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(wires, "PeerProcess", Outside)
    refused(
        "pid_namespace",
        "process is not in this PID namespace",
        ends,
        tmp_path,
        FakeDevice(),
        caplog,
    )


def test_another_version(
    ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, prefill = wires.local_place, FakeDevice()

    def newer(device: FakeDevice) -> ProcessPlace:
        return replace(here(device), version=2 if device is prefill else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(wires, "local_place", newer)
    refused(
        "version", "handshake version 1 at decode, 2 at prefill", ends, tmp_path, prefill, caplog
    )


def test_the_4_kib_probe_differs(
    ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, spoiled = FakeDevice(), []

    def spoil(slot: Slot) -> None:
        spoiled.append(slot.capacity)
        array_at(slot.address + 4095, 1)[0] ^= 0x80

    device.spoil = spoil
    refused("copy_check", "4096 bytes did not arrive", ends, tmp_path, device, caplog)
    assert spoiled == [4096]


def test_the_4_kib_probe_does_not_arrive(
    ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer reports a copy whose event never completes."""
    monkeypatch.setattr("pdserve.engine.handoff.connection.link.INTRODUCTION_S", 0.2)

    class Early(FakeDevice):
        def copy_out(self, *args: object) -> object:  # type: ignore[override]
            copy = super().copy_out(*args)  # type: ignore[arg-type]
            args[1].signal.counts[0] += 1  # type: ignore[attr-defined]
            return copy

    refused("copy_timeout", "did not end in time", ends, tmp_path, Early(), caplog)


def test_prefill_cannot_open_the_memory(
    ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Blind(FakeDevice):
        def open_memory(self, handle: bytes, size: int) -> object:  # type: ignore[override]
            raise DeviceError("cudaErrorMapBufferObjectFailed")

    refused("open_failed", "MapBufferObject", ends, tmp_path, Blind(), caplog)


def test_no_memory_for_a_second_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first writer has the only window. A second one is refused while it can still use another
    transport."""
    device = FakeDevice()
    device.most_bytes = int(1.5 * SLOTS * SLOT_BYTES)
    ends = Ends("cuda_ipc", tmp_path, device)
    first = ends.dial(Recorder())
    wait_until(lambda: len(ends.decode.messages) == 1)
    options = TransportOptions("", str(tmp_path), SLOT_BYTES, FakeDevice, SLOT_BYTES)
    second = ClosingDialer([CudaIpcTransport(options)])
    with pytest.raises(TransportRefused, match="window_memory: out of memory"):
        second.dial(ends.target, HELLO)
    assert first.open
    second.close()
    ends.close()


def test_decode_without_device_memory_does_not_listen(tmp_path: Path) -> None:
    device = FakeDevice()
    device.most_bytes = 1000
    options = TransportOptions("", str(tmp_path), SLOT_BYTES, lambda: device, SLOT_BYTES)
    with pytest.raises(TransportRefused, match="window_memory: out of memory") as caught:
        CudaIpcTransport(options).listen(INCARNATION, lambda wire: None)
    assert str(caught.value).startswith("window_memory: ")
    assert not list(tmp_path.iterdir())


def test_too_many_handshakes(ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strangers = []
    for _ in range(MAX_PROBES):
        sock = dial_unix(Path(ends.listener.address), 1.0)
        sock.sendall(wires.local_place(FakeDevice()).pack())
        assert sock.recv(1), "an answer means that it occupies a cell"
        strangers.append(sock)
    dial = dialer(tmp_path, FakeDevice)
    with pytest.raises(TransportRefused, match=f"busy: {MAX_PROBES} handshakes"):
        dial.dial(ends.target, HELLO)
    for sock in strangers:
        sock.close()
    wait_until(lambda: len(ends.decode.reasons) == MAX_PROBES + 1)
    link = dial.dial(ends.target, HELLO)
    link.close()
    dial.close()


def broken() -> FakeDevice:
    raise DeviceError("cudaErrorNoDevice: no CUDA-capable device is detected")


@pytest.mark.parametrize(
    ("device", "text"), [(None, "not on a CUDA device"), (broken, "no CUDA-capable device")]
)
def test_without_a_device_cuda_ipc_is_refused(
    tmp_path: Path, device: Callable[[], FakeDevice] | None, text: str
) -> None:
    options = TransportOptions("", str(tmp_path), SLOT_BYTES, device, SLOT_BYTES)
    (transport,) = make_transports("cuda_ipc", options)
    calls: list[Callable[[], object]] = [
        transport.check,
        lambda: transport.listen(INCARNATION, lambda wire: None),
        lambda: transport.dial(Target("", INCARNATION), 1.0),
        lambda: usable([transport], True),
    ]
    for call in calls:
        with pytest.raises(TransportRefused, match=f"no_device: .*{text}") as caught:
            call()
        assert str(caught.value).startswith("no_device: ")
    assert not list(tmp_path.iterdir())


def names(transports: list[KvTransport]) -> list[str]:
    return [transport.name for transport in transports]


def test_auto_omits_unusable_transports_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    cpu = make_transports("auto", TransportOptions())
    assert names(cpu) == ["shm", "tcp"], "cuda_ipc must not be tried for a pool in host memory"
    gpu = make_transports("auto", TransportOptions(device=broken))
    assert names(gpu) == ["cuda_ipc", "shm", "tcp"]
    with caplog.at_level("WARNING"):
        assert names(usable(gpu, False)) == ["shm", "tcp"]
    assert "transport cuda_ipc is not used: no_device" in caplog.text


def test_auto_uses_cuda_ipc_if_both_ends_have_it(tmp_path: Path) -> None:
    cuda, shm = Ends("cuda_ipc", tmp_path), Ends("shm", tmp_path)
    dial = dialer(tmp_path, FakeDevice, "auto")
    link = dial.dial(cuda.target, HELLO)
    assert link.transport == "cuda_ipc"
    link.close()
    dial.close()
    cuda.close()
    far = dialer(tmp_path, lambda: FakeDevice(OTHER), "auto")
    link = far.dial(shm.target, HELLO)
    assert (link.transport, far.refusals) == ("shm", {"cuda_ipc": 1})
    link.close()
    shm.close()


def test_an_invalid_handshake_ends_only_its_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends at once; its deadline is never reached here."""
    monkeypatch.setattr("pdserve.engine.handoff.connection.link.INTRODUCTION_S", 100 * LIMIT_S)
    for data in (bytes(54), b"KCUD" + b"\xff" * 50):
        seen = len(ends.decode.reasons)
        with dial_unix(Path(ends.listener.address), 1.0) as sock:
            sock.sendall(data)
            wait_until(lambda seen=seen: len(ends.decode.reasons) > seen)
    ends.dial(Recorder()).close()


class FewSignals(FakeDevice):
    """A device without room for the fourth signal."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 3

    def make_signal(self) -> FakeSignal:
        if not self.left:
            raise DeviceError("cudaErrorMemoryAllocation")
        self.left -= 1
        return super().make_signal()


@pytest.mark.parametrize("make", [Probes, lambda device: make_window(device, SLOT_BYTES)])
def test_resources_are_released_if_a_signal_cannot_be_made(
    make: Callable[[FakeDevice], object],
) -> None:
    open_before = open_files()
    with pytest.raises(DeviceError, match="MemoryAllocation"):
        make(FewSignals())
    assert open_files() - open_before == set()
