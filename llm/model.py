"""A model in this process: its engine thread and the inbox of each request. LLM and AsyncEngine are
its two front ends.

InProcessModel owns the engine thread; `close`, or the end of the main thread, ends the thread.
Requests that do not fit into the engine wait here without a time limit.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from heapq import heappop, heappush
from os import PathLike
from typing import Any, Protocol

from pdserve.cli.options import OptionError, options_of
from pdserve.engine.api import (
    EngineConfig,
    Event,
    Finished,
    QueueFull,
    Request,
    RequestFailed,
    Step,
)
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.thread import EngineThread
from pdserve.llm.generation import RequestEvent, SubmitRefused
from pdserve.llm.prompts import PromptMaker
from pdserve.text import ParserChoice
from pdserve.text.templates import read_template

EXIT_POLL_S = 0.5  # interval at which an unclosed model checks whether the main thread has ended
CLOSED = "the model is closed"
TemplateFile = str | PathLike[str] | None  # None: the model's own chat template
Model = str | PathLike[str] | EngineConfig  # a path, a Hugging Face id, or all options


def template_of(path: TemplateFile) -> bytes:
    """Return the source of the chat template in a file; empty without one. Raises ValueError if the
    file cannot be used."""
    try:
        return b"" if path is None else read_template(path)
    except ValueError as error:
        raise ValueError(f"chat_template: {error}") from None


class Inbox(Protocol):
    """The queue that receives the events of one or more requests."""

    def put_nowait(self, item: RequestEvent, /) -> None: ...


Deliveries = Sequence[tuple[Inbox, RequestEvent]]


def put(deliveries: Deliveries) -> None:
    """Put events into their inboxes on the calling thread."""
    for inbox, event in deliveries:
        inbox.put_nowait(event)


class InProcessModel:
    """A loaded model that runs requests. Several threads may call its methods."""

    def __init__(
        self,
        config: EngineConfig,
        parsers: ParserChoice,
        deliver: Callable[[Deliveries], None],
        template: bytes = b"",
    ) -> None:
        """Load the model and start its engine thread. `deliver` runs on the engine thread, or after
        `close` on the caller's thread, and must not block. `template`: source of the chat template;
        empty: the model's. Raises CheckpointError, and ValueError for an unknown parser."""
        engine, self.card = build_engine(config)
        try:
            self.prompts = PromptMaker(self.card, parsers, template)
        except BaseException:
            engine.close()
            raise
        self._deliver = deliver
        self._numbers = itertools.count()
        self._inboxes: dict[str, Inbox] = {}  # of requests that have not ended
        # Owned by the engine thread: requests that wait for admission, as heaps by priority and
        # arrival. Requests with a grammar have a separate heap, so that a full grammar compile
        # queue does not delay the others.
        self._waiting: dict[bool, list[tuple[int, int, Request]]] = {False: [], True: []}
        self._closed = threading.Event()
        self._thread = EngineThread(engine, self._on_step)
        self._thread.add_poll(lambda: self._admit(engine))
        self._thread.start()
        # Python waits for the engine thread at exit, and the user may not have called `close`.
        threading.Thread(target=self._close_at_exit, daemon=True, name="llm-exit").start()

    def submit(self, request: Request, inbox: Inbox) -> str:
        """Queue a request without blocking and return its new key. A rejection arrives as an event
        in `inbox`. Raises RuntimeError once closed."""
        if self._closed.is_set():
            raise RuntimeError(CLOSED)
        number = next(self._numbers)
        key = f"llm-{number}"
        self._inboxes[key] = inbox
        waiting = self._waiting[request.params.grammar is not None]
        entry = request.priority, number, replace(request, key=key)
        self._thread.post(lambda _: heappush(waiting, entry))
        if self._closed.is_set():  # closed meanwhile, perhaps before the inbox was registered
            self._fail_all()
        return key

    def _admit(self, engine: Engine) -> bool:
        """Submit the waiting requests that the engine has room for; runs before each step."""
        if self._thread.lost:
            for waiting in self._waiting.values():
                waiting.clear()
            self._fail_all(f"the device is lost: {self._thread.lost}")
            return False
        for waiting in self._waiting.values():
            while waiting and len(engine.jobs.waiting) < engine.limits.max_waiting:
                request = waiting[0][-1]
                try:
                    if request.key in self._inboxes:  # otherwise the request was aborted
                        engine.submit(request)
                except QueueFull:  # too many grammars to compile
                    break
                except Exception as error:
                    self._end([SubmitRefused(request.key, error)])
                heappop(waiting)
        return False

    def abort(self, key: str, choices: Sequence[int] = ()) -> None:
        """Abort the given choices of a request, or the whole request if `choices` is empty."""
        if choices or self._forget(key) is not None:
            self._thread.post(lambda engine: engine.abort(key, choices))

    def _forget(self, key: str) -> Inbox | None:
        """Remove and return the inbox of a request; only the first caller gets it."""
        return self._inboxes.pop(key, None)

    def _end(self, events: Sequence[RequestEvent]) -> None:
        """Deliver the last events of requests and forget their inboxes."""
        self._deliver([(inbox, e) for e in events if (inbox := self._forget(e.key)) is not None])

    def close(self) -> None:
        """Stop the engine and fail the requests that still run. May be called again."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.close()
            self._fail_all()

    def _fail_all(self, reason: str = CLOSED) -> None:
        self._end([RequestFailed(key, reason) for key in list(self._inboxes)])

    def _close_at_exit(self) -> None:
        while not self._closed.wait(EXIT_POLL_S):
            if not threading.main_thread().is_alive():
                self.close()

    def _on_step(self, step: Step) -> None:
        deliveries: list[tuple[Inbox, Event]] = []
        for event in step.events:
            ends = isinstance(event, Finished | RequestFailed)
            inbox = self._forget(event.key) if ends else self._inboxes.get(event.key)
            if inbox is not None:
                deliveries.append((inbox, event))
        if deliveries:
            self._deliver(deliveries)


def config_of(model: Model, options: dict[str, Any], owner: str) -> EngineConfig:
    """Return the checked EngineConfig. Raises TypeError for an unknown option and ValueError for a
    bad value; both messages name the option."""
    if isinstance(model, EngineConfig):
        if options:
            raise TypeError(
                f"{owner}: pass either an EngineConfig or {', '.join(options)}, not both"
            )
        config = model
    elif isinstance(model, str | PathLike):
        field_names = [option_field.name for option_field in fields(EngineConfig)]
        for name in options:
            if name not in field_names:
                close_names = get_close_matches(name, field_names, 1)
                hint = f"; did you mean {close_names[0]}?" if close_names else ""
                raise TypeError(f"{owner} has no option {name!r}{hint}")
        config = EngineConfig(model=str(model), **options)
    else:
        kind = type(model).__name__
        raise TypeError(f"{owner}: model must be a path, an id or an EngineConfig, not {kind}")
    for option in options_of(EngineConfig):
        try:
            option.accept(getattr(config, option.field), option.flag)
        except OptionError as error:
            reason = str(error).removeprefix(f"{option.flag}: ")
            raise ValueError(f"{option.field}: {reason}") from None
    if type(config.threads) is not int or config.threads < 0:
        raise ValueError(f"threads: {config.threads!r} is not a valid number of threads")
    return config
