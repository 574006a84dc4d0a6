"""Parses targets that name a Kubernetes Service, and tracks the endpoints in the Service's
EndpointSlices. Pure: no input or output.

Invariant: the newest version of each slice wins, so a repeated or late event changes nothing.
(EndpointSlice of discovery.k8s.io/v1; resource versions are increasing numbers.)
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_DELETED = 1000  # remembered names of deleted slices; beyond it, all slices are listed again
GONE = 410
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(
    rf"kubernetes://(?P<namespace>{_LABEL})?/(?P<service>{_LABEL})(?::(?P<port>{_LABEL}))?"
)


class KubernetesTarget(NamedTuple):
    """A target that names one port of a Kubernetes Service."""

    namespace: str  # empty: the pod's namespace
    service: str
    port: str  # name or number; empty: the Service's only port


def parse_kubernetes(target: str) -> KubernetesTarget | None:
    """Parse a target of the form kubernetes://[namespace]/service[:port]; return None for a target
    host:port. Raises ValueError for any other text."""
    if match := _SERVICE.fullmatch(target):
        return KubernetesTarget(match["namespace"] or "", match["service"], match["port"] or "")
    if "://" in target or not re.fullmatch(r".+:\d+", target):
        raise ValueError(
            f"{target!r} is neither host:port nor kubernetes://[namespace]/service[:port]"
        )
    return None


class SliceEndpoint(NamedTuple):
    """One process of a Service: its address (host:port), and whether Kubernetes reports it as
    ready."""

    address: str
    ready: bool


class WatchError(Exception):
    """Raised when the API server reports in a watch that the watch has failed."""


class WatchExpired(WatchError):
    """Raised when the API server no longer has the events that follow the version from which a
    watch started; the slices must be listed again."""


class _PodEndpoint(NamedTuple):
    pod: str  # its uid, or the address of an endpoint that is not a pod
    is_ipv6: bool
    endpoint: SliceEndpoint


class EndpointSlices:
    """The known EndpointSlices of a Service, and the endpoints of one of its ports.

    `port` is the name of a port, or its number; if it is empty, the slices must have only one port.
    """

    def __init__(self, port: str) -> None:
        self._port = port
        self._listed = 0  # the version of the last list
        self._newest = 0  # the newest version in a list or an event
        self._versions: dict[str, int] = {}  # by name, including deleted slices
        self._slices: dict[str, list[_PodEndpoint]] = {}

    @property
    def version(self) -> str:
        """The resource version from which to watch; empty if the slices must be listed first."""
        return str(self._newest) if self._newest else ""

    def expire(self) -> None:
        """Require that the slices are listed again, because events may have been missed. The known
        slices stay in use until then."""
        self._newest = 0

    def take_list(self, response: Any) -> None:
        """Replace all slices by the API server's response to a list request. Raises ValueError, and
        changes nothing, if `response` is not a list of EndpointSlices."""
        try:
            if response["kind"] != "EndpointSliceList":
                raise ValueError(f"kind {response['kind']!r}")
            version = int(response["metadata"]["resourceVersion"])
            items = response["items"] or ()
            versions = {_name(item): _version(item) for item in items}
            slices = {_name(item): _read(item, self._port) for item in items}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the API server's response is not a list of EndpointSlices: {error!r}"
            ) from error
        self._listed = self._newest = version
        self._versions, self._slices = versions, slices

    def take_event(self, event: Any) -> None:
        """Apply one event of a watch. Raises WatchError if the event reports that the watch failed;
        ValueError, and changes nothing, if it is not an event of an EndpointSlice."""
        try:
            kind, slice_object = event["type"], event["object"]
            if kind == "ERROR":
                expired = slice_object.get("code") == GONE
                raise (WatchExpired if expired else WatchError)(
                    slice_object.get("message") or "an error"
                )
            version = _version(slice_object)
            if kind != "BOOKMARK":
                self._take_slice(slice_object, version, kind == "DELETED")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the API server sent a line that is not an event of an EndpointSlice: {error!r}"
            ) from error
        self._newest = max(self._newest, version)
        if len(self._versions) - len(self._slices) > MAX_DELETED:
            self.expire()

    def _take_slice(self, slice_object: Any, version: int, deleted: bool) -> None:
        name = _name(slice_object)
        known_version = self._versions.get(name, 0)
        if (
            version <= self._listed
            or version < known_version
            or (version == known_version and not deleted)
        ):
            return
        if deleted:
            self._slices.pop(name, None)
        else:
            self._slices[name] = _read(slice_object, self._port)
        self._versions[name] = version

    def endpoints(self) -> list[SliceEndpoint]:
        """Return the endpoints of all slices, sorted by address. Each pod appears once: if it is in
        two slices, the most recently written one counts; if it has an IPv4 and an IPv6 address,
        IPv4 counts."""
        pods: dict[str, dict[bool, SliceEndpoint]] = {}
        for name in sorted(self._slices, key=self._versions.__getitem__):
            for pod_endpoint in self._slices[name]:
                pods.setdefault(pod_endpoint.pod, {})[pod_endpoint.is_ipv6] = pod_endpoint.endpoint
        ready: dict[str, bool] = {}
        for families in pods.values():
            address, is_ready = families[min(families)]
            ready[address] = ready.get(address, False) or is_ready  # a new pod may reuse an IP
        return [SliceEndpoint(address, ready[address]) for address in sorted(ready)]


def _name(slice_object: Any) -> str:
    return str(slice_object["metadata"]["name"])


def _version(slice_object: Any) -> int:
    return int(slice_object["metadata"]["resourceVersion"])


def _read(slice_object: Any, port: str) -> list[_PodEndpoint]:
    """Return the endpoints of one slice; empty if the slice lacks the port, or if its addresses are
    domain names instead of IP addresses."""
    family = slice_object["addressType"]
    number = _port_number(slice_object.get("ports") or (), port)
    if number is None or family not in ("IPv4", "IPv6"):
        return []
    endpoints = []
    for item in slice_object.get("endpoints") or ():
        host = item["addresses"][0]  # several addresses are equivalent
        is_ipv6 = family == "IPv6"
        ready = (item.get("conditions") or {}).get("ready")
        endpoint = SliceEndpoint(
            f"[{host}]:{number}" if is_ipv6 else f"{host}:{number}", ready is None or bool(ready)
        )
        pod = (item.get("targetRef") or {}).get("uid") or host
        endpoints.append(_PodEndpoint(pod, is_ipv6, endpoint))
    return endpoints


def _port_number(ports: Sequence[Any], port: str) -> int | None:
    if port.isdecimal():
        return int(port)
    tcp_ports = [
        item for item in ports if item.get("protocol") in (None, "TCP") and item.get("port")
    ]
    numbers = [item["port"] for item in tcp_ports if not port or item.get("name") == port]
    return int(numbers[0]) if len(numbers) == 1 else None
