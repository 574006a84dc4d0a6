"""Compiles grammars on threads of its own, and keeps the last ones.

A grammar is first tried in another process (trial.py): only what was compiled there in time is
compiled here.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
        self._kept: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()

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

    def compile(self, source: str) -> "Future[CompiledGrammar]":
        """A compiled grammar, or GrammarError; one that is the grammar's fault is kept as well.
        One thread calls this."""
        found = self._kept.get(source)
        if found is not None and not _has_failed_internally(found):
            self._kept.move_to_end(source)
            return found
        made = self._kept[source] = self._threads.submit(self._compile, source)
        self._kept.move_to_end(source)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return made

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trials.close()

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


def _has_failed_internally(made: "Future[CompiledGrammar]") -> bool:
    """Whether another attempt may succeed."""
    if not made.done() or made.cancelled():
        return made.cancelled()
    error = made.exception()
    return isinstance(error, GrammarError) and error.is_internal
