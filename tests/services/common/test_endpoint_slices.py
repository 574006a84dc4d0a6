"""The view of a Service from lists and events, in any order."""

from itertools import count
from typing import Any

import pytest
from fakes.kubernetes import endpoint_slice, status
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.services.common.endpoint_slices import (
    MAX_DELETED,
    EndpointSlices,
    SliceEndpoint,
    WatchError,
    WatchExpired,
)

Object = dict[str, Any]


def an_endpoint(host: str, pod: str = "", **conditions: bool | None) -> Object:
    found: Object = {"addresses": [host], "conditions": conditions}
    return found | ({"targetRef": {"kind": "Pod", "uid": pod}} if pod else {})


def versioned(found: Object, version: int) -> Object:
    return found | {"metadata": found["metadata"] | {"resourceVersion": str(version)}}


def a_list(version: int, *items: Object) -> Object:
    metadata = {"resourceVersion": str(version)}
    return {"kind": "EndpointSliceList", "metadata": metadata, "items": list(items)}


def view(*slices: Object, port: str = "grpc") -> list[tuple[str, bool]]:
    """Return the view of slices that were written in this order."""
    made = EndpointSlices(port)
    made.take_list(a_list(100, *(versioned(one, n) for n, one in enumerate(slices, 1))))
    return [tuple(endpoint) for endpoint in made.endpoints()]


def test_conditions() -> None:
    """A missing condition means ready, as the API says; a terminating endpoint is not ready."""
    endpoints = [
        an_endpoint("10.0.0.1", ready=True, serving=True),
        an_endpoint("10.0.0.2", ready=False, serving=False),
        an_endpoint("10.0.0.3"),
        an_endpoint("10.0.0.4", ready=None),
        {"addresses": ["10.0.0.5"], "conditions": None},
        an_endpoint("10.0.0.6", ready=False, serving=True, terminating=True),
    ]
    ready = [is_ready for _, is_ready in view(endpoint_slice("a", "router", endpoints))]
    assert ready == [True, False, True, True, True, False]


@pytest.mark.parametrize(
    ("port", "found"),
    [
        ("grpc", ["10.0.0.1:50050"]),
        ("metrics", ["10.0.0.1:9090"]),
        ("", []),  # ambiguous
        ("7000", ["10.0.0.1:7000"]),
        ("dns", []),  # over UDP
        ("none", []),
    ],
)
def test_ports(port: str, found: list[str]) -> None:
    ports = [
        {"name": "grpc", "port": 50050, "protocol": "TCP"},
        {"name": "metrics", "port": 9090},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ]
    one = endpoint_slice("a", "router", [an_endpoint("10.0.0.1")], ports)
    assert [address for address, _ in view(one, port=port)] == found


def test_the_only_port_needs_no_name() -> None:
    one = endpoint_slice("a", "router", [an_endpoint("10.0.0.1")], [{"name": "x", "port": 5}])
    assert view(one, port="") == [("10.0.0.1:5", True)]


def test_each_slice_has_a_separate_port() -> None:
    """Pods of two releases may have different numbers for one port name."""
    ports = ([{"name": "grpc", "port": n}] for n in (1, 2))
    hosts = (f"10.0.0.{n}" for n in count(1))
    slices = [endpoint_slice(f"{p}", "router", [an_endpoint(next(hosts))], p) for p in ports]
    assert view(*slices) == [("10.0.0.1:1", True), ("10.0.0.2:2", True)]


def test_a_pod_of_both_families_is_listed_once() -> None:
    four = endpoint_slice("a", "router", [an_endpoint("10.0.0.1", "p", ready=True)])
    both = [an_endpoint("fd00::1", "p", ready=True), an_endpoint("fd00::2", "q", ready=True)]
    six = endpoint_slice("b", "router", both, family="IPv6")
    assert view(four, six) == view(six, four)
    assert view(four, six) == [("10.0.0.1:50050", True), ("[fd00::2]:50050", True)]


def test_slices_with_domain_names_are_left_out() -> None:
    assert view(endpoint_slice("a", "router", [an_endpoint("x.example")], family="FQDN")) == []


def test_the_last_written_slice_counts_for_a_pod_in_two_slices() -> None:
    old = endpoint_slice("a", "router", [an_endpoint("10.0.0.1", "p", ready=True)])
    new = endpoint_slice("b", "router", [an_endpoint("10.0.0.1", "p", ready=False)])
    assert view(old, new) == [("10.0.0.1:50050", False)]
    assert view(new, old) == [("10.0.0.1:50050", True)]


def test_a_pod_may_have_the_address_of_a_terminating_one() -> None:
    gone = an_endpoint("10.0.0.1", "old", ready=False, terminating=True)
    new = an_endpoint("10.0.0.1", "new", ready=True)
    for order in ([gone, new], [new, gone]):
        assert view(endpoint_slice("a", "router", order)) == [("10.0.0.1:50050", True)]


WITHOUT_ADDRESS = versioned(endpoint_slice("b", "router", [{"addresses": []}]), 5)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"kind": "Status", "metadata": {"resourceVersion": "5"}, "items": []},
        {"kind": "EndpointSliceList", "metadata": {}, "items": []},
        {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "x"}, "items": []},
        {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "5"}},
        {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "5"}, "items": [{}]},
        a_list(5, WITHOUT_ADDRESS),
    ],
)
def test_an_invalid_list_changes_nothing(answer: object) -> None:
    slices = EndpointSlices("grpc")
    one = versioned(endpoint_slice("a", "router", [an_endpoint("10.0.0.1")]), 3)
    slices.take_list(a_list(4, one))
    with pytest.raises(ValueError, match="not a list"):
        slices.take_list(answer)
    assert slices.endpoints() == [SliceEndpoint("10.0.0.1:50050", True)]
    assert slices.version == "4"
    slices.take_list(a_list(5))
    assert slices.endpoints() == []


@pytest.mark.parametrize(
    "event",
    [
        {},
        [],
        {"type": "ADDED"},
        {"type": "ADDED", "object": {}},
        {"type": "ADDED", "object": WITHOUT_ADDRESS},
    ],
)
def test_an_invalid_event_changes_nothing(event: object) -> None:
    slices = EndpointSlices("grpc")
    slices.take_list(a_list(4))
    with pytest.raises(ValueError, match="not an event"):
        slices.take_event(event)
    assert slices.version == "4"


def test_errors_of_a_watch() -> None:
    slices = EndpointSlices("grpc")
    with pytest.raises(WatchExpired, match="too old"):
        slices.take_event({"type": "ERROR", "object": status(410, "too old")})
    with pytest.raises(WatchError, match="no leader"):
        slices.take_event({"type": "ERROR", "object": status(500, "no leader")})


def test_bookmarks_move_the_version() -> None:
    slices = EndpointSlices("grpc")
    assert slices.version == ""
    slices.take_list(a_list(4))
    slices.take_event({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
    assert slices.version == "9"
    slices.expire()
    assert slices.version == ""


def test_deleted_slices_are_forgotten_eventually() -> None:
    slices = EndpointSlices("grpc")
    slices.take_list(a_list(1))
    for number in range(MAX_DELETED + 1):
        assert slices.version
        found = versioned(endpoint_slice(f"{number}", "router", []), number + 2)
        slices.take_event({"type": "DELETED", "object": found})
    assert slices.version == "", "everything is listed again"


# --- any sequence

WRITES = st.lists(
    st.tuples(
        st.sampled_from("abc"),  # the slice
        st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=3),  # hosts, ready
        st.booleans(),  # deleted
    ),
    max_size=25,
)


class _Server:
    """The state of the API server after each write."""

    def __init__(self, writes: list[tuple[str, list[tuple[int, bool]], bool]]) -> None:
        self.events: list[Object] = []
        self.states: list[dict[str, Object]] = [{}]
        for version, (name, hosts, deleted) in enumerate(writes, 1):
            state = dict(self.states[-1])
            endpoints = [an_endpoint(f"10.0.0.{h}", f"{h}", ready=ready) for h, ready in hosts]
            found = versioned(endpoint_slice(name, "router", endpoints), version)
            kind = "DELETED" if deleted else "MODIFIED" if name in state else "ADDED"
            if deleted and state.pop(name, None) is None:
                found, kind = {"metadata": {"resourceVersion": f"{version}"}}, "BOOKMARK"
            elif not deleted:
                state[name] = found
            self.events.append({"type": kind, "object": found})
            self.states.append(state)

    def list(self, version: int) -> Object:
        return a_list(version, *self.states[version].values())


@settings(max_examples=300)
@given(WRITES, st.data())
def test_any_sequence_ends_in_the_server_s_last_state(writes: Any, data: st.DataObject) -> None:
    """Lists at any time, then events in any order, each at least once, including old ones."""
    server = _Server(writes)
    slices = EndpointSlices("grpc")
    last = len(writes)
    versions = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=3).map(sorted))
    for listed, until in zip(versions, [*versions[1:], last], strict=True):
        slices.take_list(server.list(listed))
        recent = server.events[listed:until]
        numbers = data.draw(st.lists(st.integers(0, 99), max_size=8))
        again = [server.events[number % until] for number in numbers if until]
        for event in data.draw(st.permutations([*recent, *again])):
            slices.take_event(event)
    expected = EndpointSlices("grpc")
    expected.take_list(server.list(last))
    assert slices.endpoints() == expected.endpoints()
    assert slices.version == (str(last) if last else "")
