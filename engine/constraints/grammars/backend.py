"""Compiles grammars on dedicated threads, and keeps the most recently used ones.

Before a grammar is compiled in this process, a separate sandbox process (sandbox_process.py)
compiles it, because a hostile grammar may crash the compiler or keep it busy for minutes. Only a
grammar that passes there in time is compiled here. The sandbox process starts when the first
grammar arrives. Whatever happens to it, `CompileSandbox.check` returns or raises within CHECK_S
seconds, or twice that if the process ended and was started again.
"""

import contextlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import IO, Any
from weakref import WeakKeyDictionary

from pdserve.engine.api.grammar_tokenizer import make_tokenizer
from pdserve.engine.constraints.grammars.matcher import (
    CompiledGrammar,
    GrammarError,
    GrammarTimeout,
)
from pdserve.engine.constraints.grammars.threads import FairThreadPool

log = logging.getLogger(__name__)

CHECK_S = 30.0  # including process start and grammars ahead in the queue
MAX_TRIES = 2  # if the process ends unexpectedly


class CompileSandbox:
    """Starts and owns the sandbox process; `close`, or garbage collection of this object, ends the
    process."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        vocabulary = json.dumps({"size": vocab_size, "eos_ids": list(eos_ids)}).encode()
        self._preamble = _framed(vocabulary) + _framed(tokenizer_json)
        self._lock = threading.Lock()  # never held while waiting for the process
        self._process: _SandboxProcess | None = None
        self._end: weakref.finalize[[], CompileSandbox] | None = None
        self._closed = False

    def check(self, source: str) -> None:
        """Wait until the sandbox process has compiled the grammar. Raises GrammarError if the
        grammar is wrong or exceeds a limit, a GrammarTimeout if the machine is too busy, and a
        GrammarError with `is_internal` for other failures of the sandbox."""
        for _ in range(MAX_TRIES):
            process, answer = self._send(source.encode())
            try:
                error, is_late = answer.result(CHECK_S)
            except TimeoutError:
                process.kill()
                raise GrammarTimeout(
                    f"the grammar could not be checked in time ({CHECK_S:g} s)"
                ) from None
            except CancelledError:
                continue
            if error:
                raise GrammarTimeout(error) if is_late else GrammarError(error)
            return
        raise GrammarError(
            f"the process that checks grammars ended unexpectedly {MAX_TRIES} times",
            is_internal=True,
        )

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _send(self, source: bytes) -> "tuple[_SandboxProcess, Future[tuple[str, bool]]]":
        with self._lock:
            if self._closed:
                raise GrammarError("the grammar sandbox is closed", is_internal=True)
            if self._process is None or self._process.ended:
                self._stop()
                self._process = _SandboxProcess(self._preamble)
                self._end = weakref.finalize(self, self._process.close)
            return self._process, self._process.send(source)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


class _SandboxProcess:
    """One running sandbox process. A separate thread writes to its input, so that callers of `send`
    do not wait until the process reads it."""

    def __init__(self, preamble: bytes) -> None:
        self.ended = False
        self._answers: dict[int, Future[tuple[str, bool]]] = {}
        self._num_sent = 0
        self._kill_lock = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdserve.engine.constraints.grammars.sandbox_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # otherwise `close` would write data left for a dead process
            start_new_session=True,  # a terminal's interrupt goes to the worker, which ends it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._threads = [
            threading.Thread(target=work, args=(pipe,), daemon=True, name="grammar-sandbox")
            for work, pipe in (
                (self._read, self._process.stdout),
                (self._write, self._process.stdin),
            )
        ]
        self._outbox.put(preamble)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no more threads can start
            self.kill()
            self._outbox.put(None)
            raise

    def send(self, source: bytes) -> "Future[tuple[str, bool]]":
        """Send a grammar to the process. Return a future of (error text, whether the error is
        internal), with an empty text if the grammar compiles.

        The future is cancelled if the process ends before it has answered. Only one thread at a
        time may call this method.
        """
        self._num_sent += 1
        answer = self._answers[self._num_sent] = Future()
        self._outbox.put(struct.pack("<I", self._num_sent) + _framed(source))
        if self.ended:
            answer.cancel()
        return answer

    def kill(self) -> None:
        """Kill the sandbox process and its forks; this also ends all waits for their answers. Any
        thread may call this method."""
        self.ended = True
        with self._kill_lock:
            if self._process.returncode is None:  # not reaped yet, so the id is valid
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        with self._kill_lock:
            self._process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection runs on any thread
                thread.join()

    def _write(self, pipe: IO[bytes]) -> None:
        try:
            with contextlib.suppress(OSError), pipe:
                while (data := self._outbox.get()) is not None:
                    unwritten = memoryview(data)
                    while unwritten:
                        unwritten = unwritten[pipe.write(unwritten) :]
        finally:
            self.ended = True

    def _read(self, lines: IO[bytes]) -> None:
        try:
            with lines:
                for line in lines:
                    answer: dict[str, Any] = json.loads(line)
                    future = self._answers.pop(answer["id"], None)
                    if future is not None and future.set_running_or_notify_cancel():
                        future.set_result((answer["error"], answer["is_late"]))
        except Exception:
            log.exception("reading from the grammar sandbox failed; it will be started again")
        finally:
            self.ended = True
            for unanswered in list(self._answers.values()):
                unanswered.cancel()


def _framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


NUM_THREADS = 4  # they mostly wait for the sandbox
MAX_CACHED = 64  # compiled grammars
MAX_QUEUED = 64
MAX_QUEUED_OF_TENANT = 32


class Compilation(Future[CompiledGrammar]):
    """Future of a compiled grammar; its `run` method does the compilation."""

    def __init__(self, compile_source: Callable[[], CompiledGrammar]) -> None:
        super().__init__()
        self._compile_source = compile_source

    def run(self) -> None:
        """Compile the grammar and set the future's result or exception; called on a compilation
        thread."""
        self.set_running_or_notify_cancel()
        try:
            self.set_result(self._compile_source())
        except BaseException as error:
            self.set_exception(error)


class GrammarBackend:
    """Compiles and caches grammars for one model's tokenizer. Call `load` on a thread that may
    wait, to prepare the tokenizer before the first grammar arrives."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocabulary = (tokenizer_json, vocab_size, eos_ids)
        self._sandbox = CompileSandbox(*self._vocabulary)
        self._threads = FairThreadPool[Compilation](NUM_THREADS, "grammars")
        self._load_lock = threading.Lock()
        self._tokenizer: Any = None
        self._compilations: OrderedDict[str, Compilation] = OrderedDict()  # by source
        self._num_users: WeakKeyDictionary[Compilation, int] = WeakKeyDictionary()  # requests

    def load(self) -> None:
        """Build the tokenizer that grammars need, at the first call. Raises GrammarError if
        grammars cannot use the model's tokenizer."""
        with self._load_lock:
            if self._tokenizer is not None:
                return
            try:
                self._tokenizer = make_tokenizer(*self._vocabulary)
            except Exception as error:
                log.warning("the model's tokenizer cannot be used for grammars: %s", error)
                text = "grammars cannot be used with the tokenizer of this model"
                raise GrammarError(text) from error

    def has_room(self, source: str, tenant: bytes) -> bool:
        """Whether `compile` accepts this grammar now: it is in the cache, or the queues of all
        tenants and of this tenant have room."""
        return self._cached(source) is not None or (
            self._threads.num_waiting < MAX_QUEUED
            and self._threads.num_of_tenant(tenant) < MAX_QUEUED_OF_TENANT
        )

    def compile(self, source: str, tenant: bytes = b"") -> Compilation:
        """Queue a grammar for compilation, unless it is cached; return a future of the compiled
        grammar.

        The future raises GrammarError; errors that are the grammar's fault are cached too. The
        caller must call `release` when it no longer needs the compilation. Only one thread may call
        this method and `release`.
        """
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
        """End one request's use of a compilation. If no other request uses it and it has not
        started, cancel it."""
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
        """Check a grammar in the sandbox process, then compile it in this process. Raises only
        GrammarError."""
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
    """Whether the compilation failed for a reason other than its grammar, or was cancelled, so that
    the same grammar may be compiled again."""
    if not compilation.done() or compilation.cancelled():
        return compilation.cancelled()
    error = compilation.exception()
    return isinstance(error, GrammarError) and error.is_internal
