"""A grammar compiled by llguidance for a model's tokenizer, and its matcher for one choice. The
matcher accepts the tokens that the choice generates and computes ahead of time the bitmask of the
tokens that may come next.

The engine's thread calls every method except `run`. While `run` is under way on a mask thread, that
thread owns the matcher and its state, and the engine's thread may call only `is_ready`,
`is_behind`, `is_awaited` and `wait`.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from pdserve.engine.api import GRAMMAR_LIMITS, Grammar
from pdserve.engine.constraints.grammars.threads import MaskThreads
from pdserve.engine.constraints.masks import Bitmask, SequenceSearch


class GrammarError(Exception):
    """A grammar cannot be compiled or matched.

    The message is for the author of the grammar. If `is_internal` is set, the grammar is not at
    fault, and the message is for the log.
    """

    def __init__(self, message: str, is_internal: bool = False) -> None:
        super().__init__(message)
        self.is_internal = is_internal

    @property
    def param(self) -> str:
        """Request field at fault: "grammar"; empty for an internal error."""
        return "" if self.is_internal else "grammar"


class GrammarTimeout(GrammarError):
    """A grammar could not be compiled in time: the machine is busy or lacks memory, and a later
    try may succeed. The message is for the client, too."""

    def __init__(self, message: str) -> None:
        super().__init__(message, is_internal=True)


class CompiledGrammar:
    """Compiled grammar at its start, before any token; all choices copy their matchers from it."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        """Compile `source`, a grammar in llguidance's format, for `tokenizer`. Raises
        GrammarError."""
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        raise_error(self._matcher)
        self._first = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.uint32)
        fill_bitmask(self._matcher, self._first.ctypes.data, self._first.nbytes)
        if not self._first.any() and not self._matcher.is_accepting():
            raise GrammarError("no text matches the grammar")

    def matcher(self) -> Any:
        """Return a new llguidance matcher at the start of the grammar, for one choice."""
        return self._matcher.deep_copy()

    def buffer(self) -> Bitmask:
        """Return the bitmask of the tokens that may come first, as a new array that the caller may
        change. It may be longer than the model's vocabulary needs."""
        return self._first.copy()


def fill_bitmask(matcher: Any, address: int, num_bytes: int) -> None:
    """Compute the bitmask of the tokens that may come next, and write it to the memory at
    `address`. Raises GrammarError if the matcher fails."""
    matcher.unsafe_compute_mask_ptr(address, num_bytes)
    raise_error(matcher)


def raise_error(matcher: Any) -> None:
    """Raise GrammarError if this llguidance matcher has failed; a failed matcher never recovers."""
    if matcher.is_error():
        text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise GrammarError(text or "the grammar cannot be used")


log = logging.getLogger(__name__)

# Seconds of CPU time, so that they measure the grammar and not a busy machine.
SLOW_MASK_S = 0.005  # no step waits for the next mask of a choice whose last took longer
MAX_MASK_S = 1.0
# Limits of the matcher for one token, while no other thread runs Python: it may exceed the first
# MAX_SLOW_TOKENS times in a row, and the second never.
SLOW_TOKEN_S, MAX_TOKEN_S = 0.005, 0.05
MAX_SLOW_TOKENS = 4
MAX_STEP_S = 0.01  # of the engine's thread per step, for the tokens of all choices
LONG_REPLAY = 256  # ids: a task that first accepts more than these may be slow
REPLAY_SLICE_S = 0.001  # maximum before other threads may run Python
LATE_BACKOFF = 32  # masks of a choice that no step waits for after a late one
TOO_LONG = "the grammar takes too long"
NO_MATCH = "the generated ids do not match the grammar"


class StepBudget:
    """CPU time that the engine's thread may spend per step on accepting tokens in grammars, over
    all choices together."""

    def __init__(self) -> None:
        self._used_s = 0.0
        self._began = 0.0  # in the thread's CPU time

    @property
    def is_spent(self) -> bool:
        return self._used_s > MAX_STEP_S

    def spend(self, wall_s: float) -> float:
        """Charge the time of one accepted token to the budget; return its CPU time or an upper
        bound.

        `wall_s`: elapsed time of the token in seconds. It is used as the bound for a quick token,
        because reading the CPU time takes ten times as long.
        """
        token_s = wall_s
        if wall_s > SLOW_TOKEN_S:
            token_s = min(wall_s, max(0.0, time.thread_time() - self._began))
        self._used_s += token_s
        return token_s

    def renew(self) -> None:
        """Reset the budget at the beginning of a step."""
        self._used_s = 0.0
        self._began = time.thread_time()


class GrammarMatcher:
    """Matches the tokens of one choice against its grammar. Allows every token until the ids
    `begins_after` have been generated, which start the part that the grammar applies to."""

    param = "grammar"

    def __init__(
        self,
        grammar: Grammar,
        compiled: CompiledGrammar,
        generated: list[int],
        vocab_size: int,
        tenant: bytes,
        threads: MaskThreads,
        budget: StepBudget,
        on_late: Callable[[], None],
    ) -> None:
        """Begin with the ids that the choice has already generated. `on_late` is called on a mask
        thread when a mask that no step waits for becomes ready."""
        self._compiled = compiled
        self._num_words = (vocab_size + 31) // 32
        self._tenant = tenant
        self._threads = threads
        self._budget = budget
        self._on_late = on_late
        self._search = SequenceSearch(grammar.begins_after) if grammar.begins_after else None
        self._matcher: Any = None
        self._bitmask: Bitmask | None = None
        self._address = 0  # of the bitmask: reading it from numpy takes longer than a mask
        self._unaccepted: list[int] = []  # ids for a mask thread to accept
        self._is_slow = False  # whether the last mask took long
        self._num_slow_tokens = 0  # latest slow tokens in a row
        self._backoff = 0  # next masks that no step waits for, after a late one
        self._task = _MaskTask(self, is_slow=False, is_late=True)  # the latest task
        self._is_done = True  # whether that task is done; only then another begins
        self._task_accepts = False  # whether the task has ids to accept
        self.failure: GrammarError | None = None
        self.is_terminated = False  # nothing may follow
        start = 0
        while self._search is not None and start < len(generated):
            self._seek(generated[start])
            start += 1
        if self._search is None:
            self._compute_later(generated[start:])

    def accept_token(self, token: int) -> None:
        """Record a generated token, on this thread or, if the step's time budget is spent, on a
        mask thread. An error is kept in `failure`."""
        if self._search is not None:
            self._seek(token)
            if self._search is None:
                self._compute_later([])
        elif self.failure is None:
            if self._budget.is_spent:
                self._compute_later([token])
                return
            try:
                self._accept(token, self._budget)
                self.is_terminated = self._matcher.is_stopped()
            except BaseException as error:  # a panic is not an Exception
                self._fail(error)
            if not self.is_terminated and self.failure is None:
                self._compute_next()

    def bitmask(self) -> Bitmask | None:
        """Return the bitmask of the tokens that may come next; None allows all. Call it only if
        `is_ready`."""
        if self._search is not None or self._bitmask is None:
            return None
        return self._bitmask[: self._num_words]

    @property
    def is_ready(self) -> bool:
        """Whether the bitmask for the next token is computed."""
        return self._is_done

    @property
    def is_behind(self) -> bool:
        """Whether a mask thread still has to accept generated tokens; until it has, the matcher
        does not know whether the answer is complete."""
        return self._task_accepts and not self.is_ready

    @property
    def is_awaited(self) -> bool:
        """Whether the next bitmask is ready or should be soon, so that a step that begins now can
        wait for it after its forward pass."""
        return self.is_ready or not self._task.is_late

    def wait(self, until_s: float) -> bool:
        """Wait for the next bitmask until the perf_counter time `until_s`; return whether it is
        ready.

        If it is not, no step waits for it any more, and `on_late` is called when it becomes ready.
        """
        if self._is_done or self._threads.wait(lambda: self._is_done, until_s):
            return True
        self._task.is_late = True
        if self._task.has_begun:  # otherwise it waited behind other tasks
            self._backoff = LATE_BACKOFF
        return self._is_done

    def _compute_later(self, ids: list[int]) -> None:
        """Queue a task in which a mask thread accepts `ids` and then computes the next bitmask. No
        step waits for it; `on_late` is called when it is ready."""
        self._unaccepted = ids
        self._task_accepts = True
        is_slow = self._is_slow or len(ids) > LONG_REPLAY or self._num_slow_tokens > 0
        self._begin_task(is_slow, is_late=True)

    def _compute_next(self) -> None:
        """Queue a task in which a mask thread computes the next bitmask. The next step waits for
        it, unless earlier masks of this choice were slow or late."""
        self._task_accepts = False
        self._backoff -= self._backoff > 0
        self._begin_task(self._is_slow, is_late=self._is_slow or self._backoff > 0)

    def _begin_task(self, is_slow: bool, is_late: bool) -> None:
        self._task = _MaskTask(self, is_slow, is_late)
        self._is_done = False
        self._threads.add(self._task, self._tenant, awaited=not is_late)

    def run(self, task: "_MaskTask") -> None:
        """Accept the pending tokens and compute the next bitmask; called on a mask thread."""
        self._compute()
        self._is_done = True
        self._threads.notify()
        # Another task may have begun by now, so only `task` is read.
        if task.is_late:
            self._on_late()

    def _compute(self) -> None:
        try:
            if self._matcher is None:
                self._matcher = self._compiled.matcher()
                self._bitmask = self._compiled.buffer()
                self._address = self._bitmask.ctypes.data
            if self._task_accepts:
                self._replay()
            if self._bitmask is not None and not self.is_terminated:
                started = time.thread_time()
                fill_bitmask(self._matcher, self._address, self._bitmask.nbytes)
                mask_s = time.thread_time() - started
                self._is_slow = mask_s > SLOW_MASK_S
                if mask_s > MAX_MASK_S:
                    raise GrammarError(TOO_LONG)
        except BaseException as error:  # a panic is not an Exception
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, GrammarError):
            log.error("matching a grammar failed; its request fails", exc_info=error)
            text = f"the grammar cannot be matched: {type(error).__name__}"
            error = GrammarError(text, is_internal=True)
        self.failure = error

    def _seek(self, token: int) -> None:
        if self._search is not None and self._search.push(token):
            self._search = None

    def _replay(self) -> None:
        """Accept all pending tokens; pause between them so that other threads can run Python."""
        ids, self._unaccepted = self._unaccepted, []
        started = time.thread_time()
        for token in ids:
            if self._matcher.is_stopped():
                raise GrammarError(NO_MATCH)
            self._accept(token)
            if time.thread_time() - started > REPLAY_SLICE_S:
                time.sleep(0)
                started = time.thread_time()
        raise_error(self._matcher)
        self.is_terminated = self._matcher.is_stopped()

    def _accept(self, token: int, budget: StepBudget | None = None) -> None:
        """Accept one token. Raises GrammarError if it does not match the grammar or takes too long.

        With `budget`, charges the time to it, even if the token fails.
        """
        clock = time.thread_time if budget is None else time.perf_counter
        started = clock()
        matches = self._matcher.consume_token(token)
        token_s = clock() - started
        if budget is not None:
            token_s = budget.spend(token_s)
        raise_error(self._matcher)
        if not matches:
            raise GrammarError(NO_MATCH)
        self._num_slow_tokens = self._num_slow_tokens + 1 if token_s > SLOW_TOKEN_S else 0
        if token_s > MAX_TOKEN_S or self._num_slow_tokens > MAX_SLOW_TOKENS:
            raise GrammarError(TOO_LONG)


class _MaskTask:
    """Task of a mask thread: compute the next bitmask of one GrammarMatcher."""

    __slots__ = ("_matcher", "has_begun", "is_late", "is_slow")

    def __init__(self, matcher: GrammarMatcher, is_slow: bool, is_late: bool) -> None:
        self._matcher = matcher
        self.is_slow = is_slow
        self.is_late = is_late  # no step waits for it (any more); the engine's thread sets it
        self.has_begun = False

    def run(self) -> None:
        self.has_begun = True
        self._matcher.run(self)
