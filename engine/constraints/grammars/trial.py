"""Has grammars tried by a process of their own (trial_process.py), which is started when needed.

Any thread may ask. Whatever happens to that process, the asker gets an answer within TRIAL_S.
"""

import json
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import IO, Any

from pdserve.engine.constraints.grammars.compiled import GrammarError

TRIAL_S = 30.0  # with the start of the process, and all that are tried before


class GrammarTrials:
    """Owns the process; `close` ends it, and so does the end of this object."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        vocabulary = json.dumps({"size": vocab_size, "eos_ids": list(eos_ids)}).encode()
        self._preamble = _framed(vocabulary) + _framed(tokenizer_json)
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None
        self._end: weakref.finalize[[], GrammarTrials] | None = None

    def check(self, source: str) -> None:
        """Waits for a trial. Raises GrammarError if the grammar is wrong, or takes too much."""
        with self._lock:
            if self._process is None or self._process.ended:
                self._stop()
                self._process = _TrialProcess(self._preamble)
                self._end = weakref.finalize(self, self._process.close)
            answer = self._process.ask(source.encode())
        try:
            error = answer.result(TRIAL_S)
        except (TimeoutError, CancelledError):
            raise GrammarError("the grammar could not be checked in time") from None
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


class _TrialProcess:
    """One life of the process."""

    def __init__(self, preamble: bytes) -> None:
        self.ended = False
        self._asked: dict[int, Future[str]] = {}
        self._num_asked = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.engine.constraints.grammars.trial_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True, name="grammar-trials"
        )
        self._reader.start()
        self._write(preamble)

    def ask(self, source: bytes) -> "Future[str]":
        """What is wrong with a grammar; the future is cancelled if the process ends before."""
        self._num_asked += 1
        answer = self._asked[self._num_asked] = Future()
        self._write(struct.pack("<I", self._num_asked) + _framed(source))
        if self.ended:
            answer.cancel()
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._input.close()

    def _write(self, data: bytes) -> None:
        try:
            self._input.write(data)
            self._input.flush()
        except OSError:
            self.ended = True

    def _read(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                answer: dict[str, Any] = json.loads(line)
                found = self._asked.pop(answer["trial"], None)
                if found is not None and found.set_running_or_notify_cancel():
                    found.set_result(answer["error"])
        self.ended = True
        for found in list(self._asked.values()):
            found.cancel()


def _framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
