"""A grammar over one choice: its matcher follows the ids, and the next mask is computed ahead.

The engine's thread calls everything but `run`, and while `run` is under way only `is_done`,
`is_awaited` and `wait`.
"""

import logging
import time
from collections.abc import Callable
from threading import Event
from typing import Any

from pdserve.engine.api.request import Grammar
from pdserve.engine.constraints.bitmask import Words
from pdserve.engine.constraints.grammars.compiled import (
    CompiledGrammar,
    GrammarError,
    fill,
    raise_error,
)
from pdserve.engine.constraints.grammars.mask_threads import MaskThreads
from pdserve.engine.constraints.sequence_search import SequenceSearch

log = logging.getLogger(__name__)

# Seconds of CPU time, so that they are the grammar's and not those of a busy machine.
SLOW_S = 0.005  # nobody waits for the next mask of a choice whose last took longer
MOST_S = 1.0  # that a mask may take
# That the matcher may take for one token, on the engine's thread and while no other runs Python:
# more than the first may come SLOW_TOKENS times in a row, more than the second never.
SLOW_TOKEN_S, MOST_TOKEN_S = 0.005, 0.05
SLOW_TOKENS = 4
LONG_REPLAY = 256  # ids: a matcher that follows so many first may be slow
HELD_S = 0.001  # of replaying ids before other threads have their turn
PATIENCE = 32  # masks of a choice that nobody waits for once one came too late
TOO_LONG = "the grammar takes too long"
NO_MATCH = "the generated ids do not match the grammar"


class GrammarFollower:
    """The grammar of one choice. Nothing binds until `begins_after` was generated."""

    param = "grammar"

    def __init__(
        self,
        grammar: Grammar,
        compiled: CompiledGrammar,
        generated: list[int],
        vocab_size: int,
        threads: MaskThreads,
        on_late: Callable[[], None],
    ) -> None:
        """`on_late` is called, on another thread, when a mask is there that nobody waits for."""
        self._compiled = compiled
        self._num_words = (vocab_size + 31) // 32
        self._threads = threads
        self._on_late = on_late
        self._search = SequenceSearch(grammar.begins_after) if grammar.begins_after else None
        self._matcher: Any = None
        self._words: Words | None = None
        self._address = 0  # of the words: to ask numpy for it takes longer than a mask
        self._unseen: list[int] = []  # that the matcher is still to follow
        self._done = Event()
        self._done.set()
        # Whether nobody waits for the next mask: for the first one, one after a slow one, and one
        # that a step has waited for in vain.
        self._is_late = True
        self.is_slow = False  # whether the last mask took long
        self._num_unawaited = 0  # next masks that nobody waits for, since one came too late
        self._num_slow = 0  # last tokens that took the matcher long
        self.failure: GrammarError | None = None
        self.stopped = False  # nothing may follow
        start = 0
        while self._search is not None and start < len(generated):
            self._seek(generated[start])
            start += 1
        if self._search is None:
            self._unseen = generated[start:]
            self.is_slow = len(self._unseen) > LONG_REPLAY
            self._begin_task()

    def push(self, token: int) -> None:
        if self._search is not None:
            self._seek(token)
            if self._search is None:
                self._begin_task()
        elif self.failure is None:
            try:
                self._consume(token)
                self.stopped = self._matcher.is_stopped()
            except BaseException as error:  # a panic is no Exception
                self._fail(error)
            if not self.stopped and self.failure is None:
                self._begin_task()

    def allowed(self) -> Words | None:
        """Only when `is_done`."""
        if self._search is not None or self._words is None:
            return None
        return self._words[: self._num_words]

    @property
    def is_done(self) -> bool:
        """Whether the next mask is there."""
        return self._done.is_set()

    @property
    def is_awaited(self) -> bool:
        """Whether the next mask should be there when the forward pass is over."""
        return self.is_done or not self._is_late

    def wait(self, until_s: float) -> bool:
        """Waits for the mask; False if it is not there by then: `on_late` tells when it is."""
        if self._done.is_set() or self._done.wait(max(0.0, until_s - time.perf_counter())):
            return True
        self._is_late = True
        self._num_unawaited = PATIENCE
        return self._done.is_set()

    def run(self) -> None:
        """Computes the next mask; on one of the threads."""
        try:
            if self._matcher is None:
                self._matcher = self._compiled.matcher()
                self._words = self._compiled.buffer()
                self._address = self._words.ctypes.data
                self._replay()
            if self._words is not None and not self.stopped:
                started = time.thread_time()
                fill(self._matcher, self._address, self._words.nbytes)
                took = time.thread_time() - started
                self.is_slow = took > SLOW_S
                if took > MOST_S:
                    raise GrammarError(TOO_LONG)
        except BaseException as error:  # a panic is no Exception
            self._fail(error)
        finally:
            self._done.set()
            if self._is_late:
                self._is_late = False
                self._on_late()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, GrammarError):
            log.error("a grammar cannot be followed", exc_info=error)
            text = f"the grammar cannot be followed: {type(error).__name__}"
            error = GrammarError(text, is_internal=True)
        self.failure = error

    def _seek(self, token: int) -> None:
        if self._search is not None and self._search.push(token):
            self._search = None

    def _replay(self) -> None:
        """Follows the ids that were generated before; others have their turn meanwhile."""
        ids, self._unseen = self._unseen, []
        started = time.thread_time()
        for token in ids:
            if self._matcher.is_stopped():
                raise GrammarError(NO_MATCH)
            self._consume(token)
            if time.thread_time() - started > HELD_S:
                time.sleep(0)
                started = time.thread_time()
        raise_error(self._matcher)
        self.stopped = self._matcher.is_stopped()

    def _consume(self, token: int) -> None:
        """Raises GrammarError."""
        started = time.thread_time()
        matches = self._matcher.consume_token(token)
        took = time.thread_time() - started
        raise_error(self._matcher)
        if not matches:
            raise GrammarError(NO_MATCH)
        self._num_slow = self._num_slow + 1 if took > SLOW_TOKEN_S else 0
        if took > MOST_TOKEN_S or self._num_slow > SLOW_TOKENS:
            raise GrammarError(TOO_LONG)

    def _begin_task(self) -> None:
        self._num_unawaited -= self._num_unawaited > 0
        self._is_late |= self.is_slow or self._num_unawaited > 0
        self._done.clear()
        self._threads.add(self, awaited=not self._is_late)
