"""Compiles grammars on threads of its own, and keeps the last ones.

A grammar is first tried in another process (trial.py): only what was compiled there in time is
compiled here.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from pdserve.engine.constraints.grammars.compile_queue import Compilation, CompileQueue
from pdserve.engine.constraints.grammars.compiled import (
    CompiledGrammar,
    GrammarError,
    make_tokenizer,
)
from pdserve.engine.constraints.grammars.trial import GrammarTrials

log = logging.getLogger(__name__)

NUM_THREADS = 4  # they mostly wait for trials
MAX_KEPT = 64  # compiled grammars


class GrammarCache:
    """Grammars for one tokenizer. `load` may be called ahead, from a thread that may wait."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocabulary = (tokenizer_json, vocab_size, eos_ids)
        self._trials = GrammarTrials(*self._vocabulary)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._queue = CompileQueue()
        self._kept: OrderedDict[str, Compilation] = OrderedDict()
        # Of those under way: how many requests wait for each.
        self._users: WeakKeyDictionary[Compilation, int] = WeakKeyDictionary()

    def load(self) -> None:
        """Makes the tokenizer, once. Raises GrammarError if grammars cannot use it."""
        with self._lock:
            if self._tokenizer is not None:
                return
            try:
                self._tokenizer = make_tokenizer(*self._vocabulary)
            except Exception as error:
                log.warning("grammars cannot be used with this tokenizer: %s", error)
                text = "grammars cannot be used with the tokenizer of this model"
                raise GrammarError(text) from error

    def has_room(self, source: str, tenant: bytes) -> bool:
        """Whether `compile` may be called: it adds nothing to the queue, or not too much."""
        return self._found(source) is not None or self._queue.has_room(tenant)

    def compile(self, source: str, tenant: bytes = b"") -> Compilation:
        """A compiled grammar, or GrammarError; one that is the grammar's fault is kept as well.
        One thread calls this and `leave`."""
        made = self._found(source)
        if made is None:
            made = self._kept[source] = self._queue.add(tenant, source)
            self._threads.submit(self._work)
            done = [key for key, found in self._kept.items() if found.done()]
            for key in done[: max(0, len(self._kept) - MAX_KEPT)]:
                del self._kept[key]
        self._kept.move_to_end(source)
        self._users[made] = self._users.get(made, 0) + 1
        return made

    def leave(self, made: Compilation) -> None:
        """A caller of `compile` waits no more; what nobody waits for is not compiled."""
        self._users[made] -= 1
        if not self._users[made]:
            self._queue.remove(made)

    def close(self) -> None:
        self._queue.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trials.close()

    def _found(self, source: str) -> Compilation | None:
        found = self._kept.get(source)
        return None if found is None or _has_failed_internally(found) else found

    def _work(self) -> None:
        """Compiles the next grammar; on one of the threads."""
        taken = self._queue.pop()
        if taken is None:
            return
        source, made = taken
        try:
            made.set_result(self._compile(source))
        except BaseException as error:
            made.set_exception(error)

    def _compile(self, source: str) -> CompiledGrammar:
        """Raises GrammarError and nothing else."""
        try:
            self.load()
            self._trials.check(source)
            return CompiledGrammar(self._tokenizer, source)
        except GrammarError as error:
            if error.is_internal:
                log.warning("a grammar was not compiled: %s", error)
            raise
        except BaseException as error:  # a panic is no Exception
            log.exception("a grammar was not compiled")
            text = f"the grammar was not compiled: {type(error).__name__}"
            raise GrammarError(text, is_internal=True) from error


def _has_failed_internally(made: Compilation) -> bool:
    """Whether another attempt may succeed."""
    if not made.done() or made.cancelled():
        return made.cancelled()
    error = made.exception()
    return isinstance(error, GrammarError) and error.is_internal
