"""Distributes the gateway's requests over all routers that its --routers targets resolve to.

Invariant: every open request gets exactly one terminal event. When a router is lost, is draining or
refuses a request, the request is issued again to another router with its prompt and generated ids,
its placement and a higher epoch. While no router can be reached, a request that a worker has
started waits until its deadline; other requests fail after GRACE_S.

In a sharded fleet each worker joins only some routers. A request that has a worker goes to a router
which that worker joined; any other request goes to a router that knows a worker of its model. If no
router has a worker for a request, it is retried every second, for GIVEN_BACK_S.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pdserve.gateway.router_client.model_files import LiveRouter, ModelFiles
from pdserve.gateway.router_client.resumable_request import ResumableRequest
from pdserve.gateway.router_client.routing import choose, conversation
from pdserve.gateway.router_client.session import RouterConnection
from pdserve.gateway.router_client.upstream import TakeToken
from pdserve.protos.common_pb2 import (
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    MODEL_NOT_FOUND,
    UNAVAILABLE,
    Failed,
    ModelCard,
    Start,
)
from pdserve.protos.router_pb2 import (
    Cancel,
    FleetView,
    GatewayMessage,
    PickReply,
    PickRequest,
    RequestEvent,
)
from pdserve.services.common.auth.access import Access
from pdserve.services.common.discovery import Discovery
from pdserve.services.common.errors import ServiceError, quoted
from pdserve.services.common.rpc import NumberedChoice, TokenRow, send_ids

log = logging.getLogger(__name__)

GRACE_S = 10.0  # a request that never ran fails after this time without a router
GIVEN_BACK_S = 30.0  # a request that routers return for lack of a worker fails after this
LATE_S = 2.0  # the router ends a request at its deadline; this client does so this much later
RESOLVE_S = 1.0  # between two resolutions of the targets, if no change is notified
LAST = ("finished", "failed")  # terminal events


T = TypeVar("T")


class _Inbox:
    """The queue of one request's events, in order, from the readers of router sessions to the one
    consumer of the request."""

    def __init__(
        self, request: ResumableRequest, key: bytes, now: float, take_token: TakeToken[Any] | None
    ) -> None:
        self.request = request
        self.key = key  # the key of its conversation
        self.opened = now
        self.session: RouterConnection | None = None  # the session that has the request
        self.refused_by: set[RouterConnection] = set()  # sessions that take no new requests
        self.given_back_since: float | None = None  # when a router first had no worker for it
        self._take_token = take_token
        self._items: deque[Any] = deque()  # events, results of `take_token`, and its errors
        self._waiter: asyncio.Future[None] | None = None  # the consumer's, while there are no items

    def put(self, item: Any) -> None:
        if item is not None:
            self._items.append(item)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> None:
        waits = self._waiter is not None and not self._waiter.done()  # whether the consumer waits
        if not (waits and self._take_token and self.request.take_next(choice, position, id_)):
            self.put(self.request.take_as_event(choice, position, id_))
            return
        try:
            self.put(self._take_token(choice.choice, id_))
        except Exception as error:  # fails this request, not the session that delivered the token
            self.put(error)

    async def get(self) -> Any:
        """Wait for the next event or result of `take_token` and return it. Raises the exception
        that `take_token` raised."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item


class RouterClient:
    """Sends requests to every router that a list of targets resolves to (docs/discovery.md).
    Implements `Upstream`, whose methods are described in gateway/router_client/upstream.py."""

    def __init__(self, routers: Sequence[str], access: Access, incarnation: bytes) -> None:
        if not routers:
            raise ValueError("no router address is configured; set --routers")
        self._discovery = Discovery("--routers", routers, self._on_change, ready_only=True)
        self._changed = asyncio.Event()  # set when discovery has a change
        self._resolved: set[str] = set()  # addresses of routers that may get new requests
        self._access = access
        self._incarnation = incarnation
        self._sessions: dict[str, RouterConnection] = {}  # by address
        self._inboxes: dict[str, _Inbox] = {}
        self._down_since = 0.0  # when the last working session was lost
        self._model_files = ModelFiles()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> "asyncio.Task[None]":
        """Start the task that finds routers and keeps a session with each, and return it. The task
        ends only if it fails, or by `close`."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._keep_sessions(), name="routers")
        return self._task

    def _on_change(self) -> None:
        """Make the task look for routers at once, because service discovery has a change. May be
        called from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)

    async def close(self) -> None:
        """End the sessions with all routers; open requests fail with UNAVAILABLE."""
        self._discovery.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._sessions.clear()
        for inbox in self._inboxes.values():
            inbox.put(inbox.request.fail(UNAVAILABLE, "the server is shutting down", 1000))

    @property
    def num_connected(self) -> int:
        """The number of routers with which a session is open."""
        return len(self._live())

    def _live(self) -> list[RouterConnection]:
        return [session for session in self._sessions.values() if session.channel is not None]

    def _candidates(self, refused_by: Container[RouterConnection] = ()) -> list[RouterConnection]:
        """Return the connected routers that may get a request, without those in `refused_by`.
        Prefer routers that discovery still lists; if it lists none of them, return them all."""
        candidates = [session for session in self._live() if session not in refused_by]
        return [
            session for session in candidates if session.address in self._resolved
        ] or candidates

    # --- requests

    async def open(
        self, start: Start, take_token: TakeToken[T] | None = None
    ) -> AsyncGenerator[RequestEvent | T, None]:
        loop = asyncio.get_running_loop()
        if start.request in self._inboxes:
            raise ServiceError(
                INVALID_ARGUMENT, f"request id {quoted(start.request)} is in use by an open request"
            )
        request = ResumableRequest(start, loop.time())
        inbox = _Inbox(request, conversation(start), loop.time(), take_token)
        self._inboxes[start.request] = inbox
        timer = None
        if request.deadline is not None:
            timer = loop.call_at(request.deadline + LATE_S, self._expire, inbox)
        try:
            self._assign(inbox)
            while True:
                item = await inbox.get()
                yield item
                if isinstance(item, RequestEvent) and item.WhichOneof("event") in LAST:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            del self._inboxes[start.request]
            if not request.ended:
                self._send(inbox, GatewayMessage(cancel=Cancel(request=start.request)))
            self._detach(inbox)

    def cancel(self, request: str, choices: Sequence[int] = ()) -> None:
        inbox = self._inboxes.get(request)
        if inbox is not None and not inbox.request.ended:
            inbox.request.abort(choices)
            self._send(inbox, GatewayMessage(cancel=Cancel(request=request, choices=choices)))

    def _expire(self, inbox: _Inbox) -> None:
        if not inbox.request.ended:
            self._send(inbox, GatewayMessage(cancel=Cancel(request=inbox.request.id)))
        inbox.put(inbox.request.fail(DEADLINE_EXCEEDED, "the request ran longer than its timeout"))

    def _assign(self, inbox: _Inbox) -> bool:
        """Choose a router for a request and send the request to it. Returns False if no router may
        get it; the request then waits for one."""
        self._detach(inbox)
        now = asyncio.get_running_loop().time()
        session = self._router_for(inbox, now)
        if session is None:
            return False
        inbox.session = session
        session.num_open += 1
        session.count_sent(now)
        self._issue(inbox, now)
        return True

    def _router_for(self, inbox: _Inbox, now: float) -> RouterConnection | None:
        """Choose a router for a request: one that the request's worker has joined, else one that
        knows a worker of the model, else any; None if no router may get it. If the routers that the
        worker joins have all refused the request, drop its placement, so that another worker can
        continue it."""
        candidates = {session.address: session for session in self._candidates(inbox.refused_by)}
        live = (session.address for session in self._live())
        joined = inbox.request.routers_of_its_worker(live)
        for address in joined:
            if address in candidates:
                return candidates[address]
        if joined and inbox.given_back_since is not None:
            inbox.request.drop_placement()
        knowing = candidates.keys() & self._model_files.knowing(inbox.request.model, now)
        preferred = [candidates[address] for address in sorted(knowing)]
        return choose(preferred or list(candidates.values()), inbox.key, now)

    @staticmethod
    def _detach(inbox: _Inbox) -> None:
        """Record that the request is no longer on its router."""
        if inbox.session is not None:
            inbox.session.num_open -= 1
            inbox.session = None

    def _issue(self, inbox: _Inbox, now: float) -> None:
        request = inbox.request
        start = request.issue(now, given_back=inbox.given_back_since is not None)
        if start is None:
            inbox.put(
                request.fail(DEADLINE_EXCEEDED, "the request ran longer than its timeout")
                if request.expired(now)
                else request.finish()
            )
            return
        parts, last_ids = send_ids(start.request, start.prompt_ids)
        if parts:
            last_ids = list(last_ids)
            del start.prompt_ids[:]
            start.prompt_ids.extend(last_ids)
        for part in parts:
            self._send(inbox, GatewayMessage(ids_part=part))
        self._send(inbox, GatewayMessage(start=start))

    @staticmethod
    def _send(inbox: _Inbox, message: GatewayMessage) -> None:
        """Queue a message for the router that has the request. If none has it, the message can be
        dropped: the next router receives the whole request again, and a router ends the requests of
        a lost session."""
        if inbox.session is not None:
            inbox.session.send(message)

    async def pick(self, request: PickRequest) -> PickReply:
        """Ask the router that would get a request with this prompt where it would place the
        request; in a sharded fleet, ask further routers if that one knows no worker of the model.
        Raises ServiceError UNAVAILABLE if no router replies."""
        now = asyncio.get_running_loop().time()
        start = Start(
            model=request.model, cache_salt=request.cache_salt, prompt_ids=request.prompt_ids
        )
        addresses, candidates = self._model_files.knowing(request.model, now), self._candidates()
        preferred = [
            session for session in candidates if session.address in addresses
        ] or candidates
        first = choose(preferred, conversation(start), now)
        order = sorted(candidates, key=lambda c: (c is not first, c not in preferred))
        return await self._model_files.pick(_reachable(order), request)

    # --- events of the sessions

    def up(self, session: RouterConnection) -> None:
        for inbox in list(self._inboxes.values()):
            inbox.refused_by.discard(session)
            if inbox.session is None:
                self._assign(inbox)

    def event(self, session: RouterConnection, event: RequestEvent) -> None:
        kind = event.WhichOneof("event")
        inbox = None if kind is None else self._inboxes.get(getattr(event, kind).request)
        if inbox is None or inbox.session is not session:
            return
        failed = event.failed
        if kind == "failed" and self._may_go_elsewhere(inbox, failed):
            inbox.refused_by.add(session)
            inbox.request.refused(failed)
            if failed.elsewhere and inbox.given_back_since is None:
                inbox.given_back_since = asyncio.get_running_loop().time()
            if self._assign(inbox) or self._is_retried(inbox):
                return
        elif kind == "placed":
            inbox.given_back_since = None
        inbox.put(inbox.request.take(event))

    def _may_go_elsewhere(self, inbox: _Inbox, failed: Failed) -> bool:
        """Return whether to offer a request that a router refused to another router: the refusing
        router had not begun it and is draining, or (in a sharded fleet) no worker of its model has
        joined that router."""
        if failed.attempt:
            return False
        sharded = self._model_files.sharded or inbox.given_back_since is not None
        code = failed.failure.code
        return code == UNAVAILABLE or (sharded and code == MODEL_NOT_FOUND)

    @staticmethod
    def _is_retried(inbox: _Inbox) -> bool:
        """Return whether a request that every router has refused for lack of a worker is tried
        again; it fails after GIVEN_BACK_S."""
        since = inbox.given_back_since
        return since is not None and asyncio.get_running_loop().time() - since < GIVEN_BACK_S

    def _retry_given_back(self) -> None:
        """Issue the requests again that every router has refused for lack of a worker; any router
        may get them."""
        for inbox in list(self._inboxes.values()):
            if inbox.session is None and inbox.given_back_since is not None:
                inbox.refused_by.clear()
                if not inbox.request.ended:
                    self._assign(inbox)

    def rows(self, session: RouterConnection, rows: Iterable[TokenRow]) -> None:
        for choice, position, id_ in rows:
            inbox = self._inboxes.get(choice.request)
            if inbox is not None and inbox.session is session:
                inbox.put_token(choice, position, id_)

    def down(self, session: RouterConnection) -> None:
        now = asyncio.get_running_loop().time()
        if session.has_worked:
            self._down_since = now
        for inbox in list(self._inboxes.values()):
            if inbox.session is session:
                self._detach(inbox)
                inbox.refused_by.clear()
                self._assign(inbox)
        self._fail_unplaced(now)

    def _fail_unplaced(self, now: float) -> None:
        """If no router is connected, fail the requests that no worker has started and that have
        waited longer than GRACE_S."""
        if self._live():
            return
        for inbox in list(self._inboxes.values()):
            may_wait = inbox.request.placed and inbox.request.deadline is not None
            if not may_wait and now - max(inbox.opened, self._down_since) > GRACE_S:
                inbox.put(inbox.request.fail(UNAVAILABLE, "no router can be reached", 1000))

    # --- the sessions

    async def _keep_sessions(self) -> None:
        """Resolve the targets repeatedly and open a session to each new router; drop the sessions
        that are lost and whose address is no longer resolved."""
        reported: set[str] = set()
        while True:
            self._changed.clear()
            resolved = await asyncio.to_thread(self._discovery.look)
            unresolved = {name for name, addresses in resolved.items() if not addresses}
            for name in sorted(unresolved - reported):
                log.warning("router %s has no address; retrying", name)
            reported = unresolved
            self._resolved = {address for addresses in resolved.values() for address in addresses}
            for address in sorted(self._resolved - self._sessions.keys()):
                self._sessions[address] = RouterConnection(
                    address, self._access, self._incarnation, self
                )
            for session in list(self._sessions.values()):
                if session.failure.done():
                    session.failure.result()
                if session.address not in self._resolved and session.channel is None:
                    del self._sessions[session.address]
                    await session.close()
            self._fail_unplaced(asyncio.get_running_loop().time())
            self._retry_given_back()
            with suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_S):
                    await self._changed.wait()

    # --- models and fleet

    def _routers(self) -> list[LiveRouter]:
        """Return the connected routers, the one with the oldest session first, since a router that
        has just started may not know any worker yet."""
        return _reachable(sorted(self._live(), key=lambda session: session.up_since))

    async def models(self) -> Sequence[ModelCard]:
        return await self._model_files.models(self._routers())

    async def blob(self, digest: str) -> bytes:
        return await self._model_files.blob(self._routers(), digest)

    async def fleet(self) -> FleetView:
        return await self._model_files.fleet(self._routers())


def _reachable(sessions: Iterable[RouterConnection]) -> list[LiveRouter]:
    return [LiveRouter(s.address, s.channel) for s in sessions if s.channel is not None]
