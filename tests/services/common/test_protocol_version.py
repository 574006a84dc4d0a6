"""Compatibility of releases, and the errors between incompatible ones."""

import logging

import pytest

from pdserve.protos.common_pb2 import INCOMPATIBLE_VERSION
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import VersionGate, channel, host_of
from pdserve.services.common.rpc.channel import MAX_LOGGED_PEERS, incompatibility


@pytest.mark.parametrize(
    ("version", "peer_version", "compatible"),
    [
        (1, 0, False), (1, 1, True), (1, 2, True), (1, 3, False),
        (2, 0, False), (3, 1, False), (3, 2, True), (3, 4, True),
    ],
)  # fmt: skip
def test_a_release_is_compatible_with_its_neighbours(
    version: int, peer_version: int, compatible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROTOCOL_VERSION", version)
    assert (incompatibility(peer_version, "router", "worker a:1") == "") == compatible


def test_the_error_says_to_upgrade_the_older_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PROTOCOL_VERSION", 3)
    assert incompatibility(1, "router", "worker a:1") == (
        "protocol version 3 of the router does not match 1 of the worker a:1: "
        "upgrade the worker a:1 to a release with version 2 first"
    )
    assert incompatibility(6, "router", "worker a:1") == (
        "protocol version 3 of the router does not match 6 of the worker a:1: "
        "upgrade the router to a release with version 5 first"
    )


def test_the_error_about_a_peer_without_a_version_names_one_that_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, needed in ((1, 1), (3, 2)):
        monkeypatch.setattr(channel, "PROTOCOL_VERSION", version)
        assert incompatibility(0, "router", "worker a:1") == (
            f"protocol version {version} of the router does not match 0 of the worker a:1: "
            f"upgrade the worker a:1 to a release with version {needed} first"
        )


def test_a_refused_peer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    gate = VersionGate("router")
    for peer in ("worker a:1", "worker a:1", "worker b:1", "worker a:1"):
        with pytest.raises(ServiceError) as caught:
            gate.check(9, peer)
        assert (caught.value.code, caught.value.param) == (INCOMPATIBLE_VERSION, "protocol")
    assert [r.message.count("worker a:1") > 0 for r in caplog.records] == [True, False]
    gate.check(1, "worker a:1")  # it was upgraded
    with pytest.raises(ServiceError):
        gate.check(9, "worker a:1")
    assert len(caplog.records) == 3


def test_of_many_refused_peers_the_recent_ones_are_remembered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    gate = VersionGate("router")
    for number in range(2 * MAX_LOGGED_PEERS):  # pods that come and go
        for peer in (f"worker {number}:1", "worker a:1"):
            with pytest.raises(ServiceError):
                gate.check(9, peer)
    refusals = [record.args for record in caplog.records]
    assert len(refusals) == 2 * MAX_LOGGED_PEERS + 1
    assert sum("worker a:1" in str(args) for args in refusals) == 1
    with pytest.raises(ServiceError):
        gate.check(9, "worker 0:1")
    assert len(caplog.records) == len(refusals) + 1, "it was forgotten"


def test_the_host_of_a_call() -> None:
    assert host_of("ipv4:10.1.2.3:4711") == "10.1.2.3"
    assert host_of("ipv6:%5B::1%5D:4711") == "[::1]"
    assert host_of("unix:/run/x") == "unix:/run/x"
