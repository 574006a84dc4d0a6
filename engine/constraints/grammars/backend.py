"""Compiles grammars on dedicated threads, and keeps the most recent ones.

A sandbox compiles each grammar first (sandbox.py); only a grammar that passes there in time is
compiled here.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from pdserve.engine.api.grammar_tokenizer import make_tokenizer
from pdserve.engine.constraints.grammars.compiled import (
    CompiledGrammar,
    GrammarError,
)
from pdserve.engine.constraints.grammars.sandbox import CompileSandbox
from pdserve.engine.constraints.grammars.threads import FairThreadPool

log = logging.getLogger(__name__)

NUM_THREADS = 4  # they mostly wait for the sandbox
MAX_CACHED = 64  # compiled grammars
MAX_QUEUED = 64
MAX_QUEUED_OF_TENANT = 32


class Compilation(Future[CompiledGrammar]):
    """A grammar before, during or after its compilation."""

    def __init__(self, compile_source: Callable[[], CompiledGrammar]) -> None:
        super().__init__()
        self._compile_source = compile_source

    def run(self) -> None:
        """Compile the grammar; runs on one of the threads."""
        self.set_running_or_notify_cancel()
        try:
            self.set_result(self._compile_source())
        except BaseException as error:
            self.set_exception(error)


class GrammarBackend:
    """Grammars for one tokenizer. A thread that may wait can call `load` ahead."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocabulary = (tokenizer_json, vocab_size, eos_ids)
        self._sandbox = CompileSandbox(*self._vocabulary)
        self._threads = FairThreadPool[Compilation](NUM_THREADS, "grammars")
        self._load_lock = threading.Lock()
        self._tokenizer: Any = None
        self._compilations: OrderedDict[str, Compilation] = OrderedDict()  # by source
        self._num_users: WeakKeyDictionary[Compilation, int] = WeakKeyDictionary()  # requests

    def load(self) -> None:
        """Make the tokenizer, once. Raises GrammarError if grammars cannot use it."""
        with self._load_lock:
            if self._tokenizer is not None:
                return
            try:
                self._tokenizer = make_tokenizer(*self._vocabulary)
            except Exception as error:
                log.warning("grammars cannot be used with this tokenizer: %s", error)
                text = "grammars cannot be used with the tokenizer of this model"
                raise GrammarError(text) from error

    def has_room(self, source: str, tenant: bytes) -> bool:
        """Whether `compile` may be called: the grammar is kept, or the queue has room."""
        return self._cached(source) is not None or (
            self._threads.num_waiting < MAX_QUEUED
            and self._threads.num_of_tenant(tenant) < MAX_QUEUED_OF_TENANT
        )

    def compile(self, source: str, tenant: bytes = b"") -> Compilation:
        """Return a future of the compiled grammar or of a GrammarError; errors that are the
        grammar's fault are kept too. The caller must call `release` later; one thread makes all
        these calls."""
        compilation = self._cached(source)
        if compilation is None:
            compilation = self._compilations[source] = Compilation(lambda: self._compile(source))
            self._threads.add(compilation, tenant)
            self._threads.start(1)
            done = [key for key, cached in self._compilations.items() if cached.done()]
            for key in done[: max(0, len(self._compilations) - MAX_CACHED)]:
                del self._compilations[key]
        self._compilations.move_to_end(source)
        self._num_users[compilation] = self._num_users.get(compilation, 0) + 1
        return compilation

    def release(self, compilation: Compilation) -> None:
        """End one request's use of a compilation; cancel it if no other request waits for it."""
        self._num_users[compilation] -= 1
        if not self._num_users[compilation] and self._threads.remove(compilation):
            compilation.cancel()

    def close(self) -> None:
        for compilation in self._threads.close():
            compilation.cancel()
        self._sandbox.close()

    def _cached(self, source: str) -> Compilation | None:
        compilation = self._compilations.get(source)
        return None if compilation is None or _may_be_retried(compilation) else compilation

    def _compile(self, source: str) -> CompiledGrammar:
        """Compile a grammar. Raises only GrammarError."""
        try:
            self.load()
            self._sandbox.check(source)
            return CompiledGrammar(self._tokenizer, source)
        except GrammarError as error:
            if error.is_internal:
                log.warning("failed to compile a grammar: %s", error)
            raise
        except BaseException as error:  # a panic is not an Exception
            log.exception("failed to compile a grammar")
            text = f"failed to compile the grammar: {type(error).__name__}"
            raise GrammarError(text, is_internal=True) from error


def _may_be_retried(compilation: Compilation) -> bool:
    """Whether it ended without a result for a reason other than the grammar."""
    if not compilation.done() or compilation.cancelled():
        return compilation.cancelled()
    error = compilation.exception()
    return isinstance(error, GrammarError) and error.is_internal
