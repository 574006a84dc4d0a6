"""Watches the EndpointSlices of a Service at the Kubernetes API server, on one thread per Service.

While the API server is unreachable, the last known endpoints stay in use; they become empty only if
the server reports so. If a watch ends for any reason other than the server's time limit, the slices
are listed again, which recovers missed events.
"""

import json
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from io import BufferedIOBase
from typing import Any

from pdserve.services.common.endpoint_slices import (
    GONE,
    EndpointSlices,
    KubernetesTarget,
    SliceEndpoint,
    WatchError,
    WatchExpired,
)
from pdserve.services.common.kubernetes_api import (
    MAX_BYTES,
    ApiServer,
    ApiServerError,
    read_json,
)

log = logging.getLogger(__name__)

WATCH_S = 45  # the server ends a watch after about this time, and another one begins
SILENT_S = 5.0  # silence beyond the length of a watch after which the server counts as lost
LIST_S = 10.0  # between two bytes of a list
FIRST_S = 2.0  # how long the first look waits for the first list
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
MAX_BROKEN = 3  # failures in a row that count if the server begins each watch: 0.8 s
MAX_FAILURES = 16  # that lengthen a pause, which reaches its maximum long before
SOON_S = 1.0  # a watch that ends sooner did not reach its time limit
FORBIDDEN = 403
RULE = (
    "the pod's service account needs a Role with the verbs get, list and watch for the resource "
    "endpointslices of apiGroup discovery.k8s.io in %s (k8s/components/endpoint-slices)"
)


def read_lines(response: BufferedIOBase) -> Iterator[Any]:
    """Yield the events of a watch, one JSON object per line, until the watch ends. Raises
    ConnectionError if it ends in the middle of a line, ValueError if a line is not JSON."""
    while line := response.readline(MAX_BYTES):
        if not line.endswith(b"\n"):
            raise ConnectionError(
                "the connection to the API server ended in the middle of an event"
            )
        yield json.loads(line)


FORESEEN = (ApiServerError, WatchError, OSError, ValueError)


class EndpointSliceWatch:
    """A Resolver for one Kubernetes Service. Its thread starts at the first call of `addresses`,
    and is the only writer of its state."""

    def __init__(
        self, target: KubernetesTarget, on_change: Callable[[], None], ready_only: bool
    ) -> None:
        """`on_change` is called on the watch's thread when the endpoints change. `ready_only`
        excludes endpoints that are not ready. Raises ValueError if this process does not run in a
        pod."""
        self._target = target
        self._on_change = on_change
        self._ready_only = ready_only
        self._api = ApiServer()
        self._slices = EndpointSlices(target.port)
        self._endpoints: list[SliceEndpoint] = []
        self._listed = threading.Event()  # set after the first list, or by close
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._last_failure = ""
        self._received_event = False  # whether the last watch had an event
        self._opened = math.inf  # when the last watch began
        self._thread = threading.Thread(
            target=self._run, name=f"endpoints {target.service}", daemon=True
        )

    def addresses(self) -> list[str]:
        if not self._thread.ident and not self._closed.is_set():
            self._thread.start()
            self._listed.wait(FIRST_S)
        return [
            endpoint.address
            for endpoint in self._endpoints
            if endpoint.ready or not self._ready_only
        ]

    def close(self) -> None:
        self._closed.set()
        self._listed.set()
        if (sock := self._socket) is not None:
            with suppress(OSError):  # already closed
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # keeps TLS state

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            self._received_event, self._opened = False, math.inf
            error: Exception | None = None
            try:
                if not self._slices.version:
                    self._list()
                self._watch()
            except Exception as failure:  # this thread must survive, or the view goes stale
                error = failure
                self._slices.expire()
                self._log_failure(error)
            lasted = time.monotonic() - self._opened > SOON_S
            if lasted or self._received_event:
                failures = 0
            elif self._opened < math.inf:
                failures = min(failures, MAX_BROKEN)
            if error is None and lasted:
                continue
            wait_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**failures)
            wait_s = max(wait_s, min(MAX_BACKOFF_S, getattr(error, "retry_after_s", 0.0)))
            failures = min(failures + 1, MAX_FAILURES)
            self._closed.wait(wait_s * random.uniform(0.5, 1.0))

    def _get(self, **query: str) -> AbstractContextManager[BufferedIOBase]:
        namespace = self._target.namespace or self._api.namespace()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        query["labelSelector"] = f"kubernetes.io/service-name={self._target.service}"
        silent_s = WATCH_S + SILENT_S if "watch" in query else LIST_S
        return self._api.get(path, query, silent_s, self._connected)

    def _list(self) -> None:
        with self._get() as response:
            self._slices.take_list(read_json(response))
        self._publish()
        self._listed.set()

    def _watch(self) -> None:
        """Send a watch request and apply its events until the API server ends the watch at its time
        limit."""
        limit_s = max(1, round(WATCH_S * random.uniform(0.75, 1.0)))
        with self._get(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=self._slices.version,
            timeoutSeconds=str(limit_s),
        ) as response:
            self._opened = time.monotonic()
            if self._last_failure:
                log.info("watching the EndpointSlices of %s again", self._target.service)
                self._last_failure = ""
            for event in read_lines(response):
                self._slices.take_event(event)
                self._received_event = True
                self._publish()
                if not self._slices.version:
                    return

    def _publish(self) -> None:
        endpoints = self._slices.endpoints()
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self._on_change()

    def _connected(self, sock: socket.socket) -> None:
        self._socket = sock
        if self._closed.is_set():
            raise ConnectionError("closed")

    def _log_failure(self, error: Exception) -> None:
        """Log why listing or watching failed; a repeated reason is logged again only after a watch
        has begun."""
        foreseen = isinstance(error, FORESEEN)
        reason = (str(error) if foreseen else repr(error)) or type(error).__name__
        status = getattr(error, "status", 0)
        if isinstance(error, WatchExpired) or status == GONE:
            log.debug(
                "the watch of the EndpointSlices of %s expired: %s; listing them again",
                self._target.service,
                reason,
            )
            return
        if reason == self._last_failure or self._closed.is_set():
            return
        self._last_failure = reason
        if status == FORBIDDEN:
            namespace = self._target.namespace or "the pod's own namespace"
            reason = f"{reason}; {RULE % namespace}"
        text = "cannot watch the EndpointSlices of %s: %s; using the last %d known endpoints"
        cause = None if foreseen else error
        log.warning(text, self._target.service, reason, len(self._endpoints), exc_info=cause)
