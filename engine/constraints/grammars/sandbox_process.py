"""The sandbox process, which compiles each grammar before a worker does.

A hostile grammar can take minutes to compile or overflow the stack; neither may happen in a worker.
Each grammar is compiled in a fork of this process, which has one thread and the tokenizer, with
limits on CPU time, memory and stack. The stack is smaller than those of a worker's threads, and the
other limits ensure that a grammar that compiles within them also compiles quickly in a worker.

The input is the vocabulary as JSON and the tokenizer.json, then for each grammar an id (4 bytes)
and its source; a length precedes each of these except the id. The output is a line of JSON for each
grammar: the id, the error text, and whether the error is internal. The process ends when its input
ends.
"""

import json
import os
import resource
import select
import signal
import struct
import threading
import time

from pdserve.engine.api.grammar_tokenizer import make_tokenizer
from pdserve.engine.constraints.grammars.matcher import (
    CompiledGrammar,
    GrammarError,
)

STDIN, STDOUT = 0, 1
CPU_S = 2
WALL_S = 10.0  # limit for a fork that gets little CPU
MEMORY_BYTES = 1 << 30  # in addition to what the process has already
STACK_BYTES = 2 << 20
COPY_S = 0.05  # maximum for a copy; every choice begins with one
MAX_RUNNING = 2
NICENESS = 5
TICK_S = 0.005
MAX_ERROR_CHARS = 1000
COMPLEX = "the grammar is too complex"


def main() -> None:
    os.nice(NICENESS)
    vocabulary = json.loads(_read_framed())
    tokenizer = make_tokenizer(_read_framed(), vocabulary["size"], vocabulary["eos_ids"])
    running: dict[int, tuple[int, float]] = {}  # process: (id of the grammar, deadline)
    poll = select.poll()
    poll.register(STDIN, select.POLLIN)
    while True:
        wait_ms = TICK_S * 1000 if running else None
        if len(running) < MAX_RUNNING and poll.poll(wait_ms):
            head = _read(4)
            if not head:
                return
            (number,) = struct.unpack("<I", head)
            text = _read_framed().decode()
            child = os.fork()
            if not child:
                _compile(number, text, tokenizer)
            running[child] = (number, time.monotonic() + WALL_S)
        elif len(running) == MAX_RUNNING:
            time.sleep(TICK_S)
        for child, (number, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[child]
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                    # It timed out, or the machine lacks memory; the fork hit none of its limits.
                    _answer(number, "the grammar could not be checked in time", is_late=True)
                elif status:
                    _answer(number, COMPLEX)


def _compile(number: int, source: str, tokenizer: object) -> None:
    """Compile one grammar in the forked process, write the answer, and exit. `number`: the
    grammar's id."""
    os.close(STDIN)  # so that the writer notices when the process has ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))  # SIGXCPU, not SIGKILL
    with open("/proc/self/statm") as statm:
        memory = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    threading.stack_size(STACK_BYTES)

    def run() -> None:
        error = ""
        try:
            grammar = CompiledGrammar(tokenizer, source)
            started = time.thread_time()
            grammar.matcher()
            error = COMPLEX if time.thread_time() - started > COPY_S else ""
        except GrammarError as failure:
            error = str(failure)
        _answer(number, error)
        os._exit(0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    os._exit(1)


def _answer(number: int, error: str, is_late: bool = False) -> None:
    os.write(STDOUT, answer_line(number, error, is_late))


def answer_line(number: int, error: str, is_late: bool = False) -> bytes:
    """Return the answer to one grammar as a line of JSON; the error text is shortened until the
    line fits one atomic write (PIPE_BUF bytes), so that lines of several forks do not mix."""
    error = error[:MAX_ERROR_CHARS]
    while True:
        answer = {"id": number, "error": error, "is_late": is_late}
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:
            return line
        error = error[: len(error) * 3 // 4]


def _read_framed() -> bytes:
    (length,) = struct.unpack("<I", _read(4))
    return _read(length)


def _read(length: int) -> bytes:
    """Read `length` bytes from the standard input; return b"" if the input ends before. Does not
    buffer, because `poll` would not see buffered bytes."""
    parts: list[bytes] = []
    while length and (part := os.read(STDIN, length)):
        parts.append(part)
        length -= len(part)
    return b"" if length else b"".join(parts)


if __name__ == "__main__":
    main()
