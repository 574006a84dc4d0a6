"""The fork server of one model: loads its tokenizer and template, and forks tokenizer workers.

A model's files are untrusted: one operation (a regular expression, a comparison of nested lists)
can exhaust memory or never end. They are used only here, under limits that the kernel enforces: a
timer's signal kills a worker that exceeds a time limit. Workers share the loaded memory. Messages
are handled one at a time, so a process has one thread.
"""

import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait

from pdserve.services.common.errors import MAX_MESSAGE, MAX_QUOTED, cut
from pdserve.services.common.logs import configure_logging
from pdserve.services.common.process import die_with, show_as
from pdserve.text.errors import TextError, TooLong, UnsupportedTokenizer, least_tokens
from pdserve.text.messages import TemplateInput
from pdserve.text.model import TextModel
from pdserve.text.request import Structure
from pdserve.text.templates import Capabilities
from pdserve.text.tokenizer import TextModelInfo, store_tokens
from pdserve.text.workers.messages import (
    FORK,
    LATE_SIGNAL,
    PROMPT_SIGNAL,
    RENDER_SIGNAL,
    SIZE_BYTES,
    WorkerLimits,
    WorkerMessage,
    head_of,
    pack,
    size_of,
    subject,
    with_ids,
)

log = logging.getLogger(__name__)

MAX_FILES = 256  # open files: a few, and one per worker


def main() -> None:
    """Run the process until the gateway closes the socket or dies. Arguments: the socket's
    descriptor, WorkerLimits as JSON, and the format of log lines."""
    show_as("tokenizer")
    configure_logging("tokenizer", log_format=sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    control = socket.socket(fileno=int(sys.argv[1]))
    with suppress(ConnectionError):  # the gateway is gone
        _serve(control, WorkerLimits(**json.loads(sys.argv[2])))


def _probe(model: TextModel, limits: WorkerLimits) -> None:
    """Probe the template in a child under the limits of a prompt. A template that exceeds them
    gets default capabilities, and its prompts fail."""
    if model.template is None:
        return
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as answer:
        pid = os.fork()
        if not pid:
            try:
                _bound_memory(limits.prompt_bytes)
                _set_timer(RENDER_SIGNAL, limits.render_s)
                _set_timer(LATE_SIGNAL, min(limits.late_s, limits.load_s / 2))
                os.write(write_fd, json.dumps(asdict(model.template.capabilities)).encode())
            finally:
                os._exit(0)
        os.close(write_fd)
        text = answer.read()
        os.waitpid(pid, 0)
    model.template.capabilities = Capabilities.decoded(text) if text else Capabilities()


def _description(model: TextModel) -> WorkerMessage:
    """Return the message from which the gateway builds LoadedTokenizer."""
    tokens = map(model.tokenizer.token_name, range(model.tokenizer.model_info.vocab_size))
    head = {
        "decoder": model.tokenizer.decoder,
        "special_ids": sorted(model.tokenizer.special.ids),
        "has_template": model.template is not None,
        "tool_parser": model.tool_parser,
        "reasoning_parser": model.reasoning_parser,
        "defaults": asdict(model.defaults),
    }
    return WorkerMessage(head, store_tokens(list(tokens)))


def _serve(control: socket.socket, limits: WorkerLimits) -> None:
    """Load the model of the first message, then serve forks. Raises ConnectionError."""
    request = _receive(control)
    if request is None:
        return
    # From here on, a crash is due to the files.
    control.sendall(pack(WorkerMessage({"received": True})))
    try:
        _bound_memory(limits.load_bytes)
        _set_timer(LATE_SIGNAL, limits.load_s)
        files = dict(zip(request.head["files"], request.parts, strict=True))
        model = TextModel(TextModelInfo(**request.head["model_info"]), files)
        _probe(model, limits)
        answer = _description(model)
        _set_timer(LATE_SIGNAL, 0)
    except UnsupportedTokenizer as error:
        answer = WorkerMessage({"error": cut(str(error), MAX_MESSAGE)})
    except MemoryError:
        answer = WorkerMessage({"error": "its files need too much memory"})
    except BaseException as error:
        answer = WorkerMessage({"error": cut(f"{type(error).__name__}: {error}", MAX_MESSAGE)})
    control.sendall(pack(answer))
    if "error" not in answer.head:
        gc.collect()
        gc.freeze()  # a collection in a worker would copy the shared pages
        _serve_forks(control, lambda sock: work(sock, model, limits))


def _serve_forks(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Fork a worker for each received socket, and report how it ends. Raises ConnectionError."""
    parent_pid = os.getpid()
    running: dict[int, int] = {}  # pidfd: pid
    while True:
        for ready in wait([control, *running]):
            if ready is not control:
                assert isinstance(ready, int)
                pid = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(ready)
                control.sendall(pack(WorkerMessage({"ended": pid, "code": code})))
                continue
            data, fds, _, _ = socket.recv_fds(control, len(FORK), 1)
            if not data:
                return
            with socket.socket(fileno=fds[0]) as sock:
                pid = os.fork()
                if not pid:
                    control.close()
                    for fd in running:
                        os.close(fd)
                    die_with(parent_pid)
                    with suppress(ConnectionError):  # the gateway is gone
                        work(sock)
                    os._exit(0)
            running[os.pidfd_open(pid)] = pid
            control.sendall(pack(WorkerMessage({"forked": pid})))


def work(sock: socket.socket, model: TextModel, limits: WorkerLimits) -> None:
    """Answer messages until the gateway closes the socket or this worker cannot continue."""
    _bound_memory(limits.prompt_bytes)
    while (request := _receive(sock)) is not None:
        _set_timer(LATE_SIGNAL, limits.late_s)
        try:
            answer = _answer(request, model, limits)
        except TextError as error:
            # Cut: the error may quote the client.
            head: dict[str, object] = {"error": cut(str(error), MAX_QUOTED), "param": error.param}
            if isinstance(error, TooLong):
                head["num_tokens"] = error.num_tokens
            answer = WorkerMessage(head)
        except MemoryError:
            text = f"the {subject(request)} needs too much memory to be prepared"
            answer = WorkerMessage({"error": text, "last": True})
        except BaseException as error:  # includes panics of Rust libraries
            text = f"the {subject(request)} cannot be prepared: {type(error).__name__}"
            answer = WorkerMessage({"error": text, "last": True})
        for timer in (RENDER_SIGNAL, PROMPT_SIGNAL, LATE_SIGNAL):
            _set_timer(timer, 0)
        sock.sendall(pack(answer))
        if "last" in answer.head:
            return


def _answer(request: WorkerMessage, model: TextModel, limits: WorkerLimits) -> WorkerMessage:
    """Do the work of one message. Raises TextError."""
    head = request.head
    if head["op"] == "grammar":
        if not model.has_loaded_grammars:  # loading does not count toward a grammar's limits
            _bound_memory(limits.load_bytes)
            model.load_grammars()
            _bound_memory(limits.prompt_bytes)
        _set_timer(PROMPT_SIGNAL, limits.grammar_s)
        return WorkerMessage({}, [model.grammar(Structure.decoded(request.parts[0])).encode()])
    if head["op"] == "sequences":
        _set_timer(PROMPT_SIGNAL, limits.prompt_s)
        return with_ids([model.tokenizer.encode_within(text) for text in head["texts"]])
    ids = _prompt(request, model, limits)
    if len(ids) > head["max_len"]:
        raise TooLong(f"the prompt has {len(ids)} tokens", len(ids))
    return with_ids([ids])


def _prompt(request: WorkerMessage, model: TextModel, limits: WorkerLimits) -> list[int]:
    """Return the token ids of a prompt. Raises TextError."""
    head = request.head
    if head["op"] == "text":
        _set_timer(PROMPT_SIGNAL, limits.prompt_s)
        return model.tokenizer.encode(
            request.parts[0].decode("utf-8", "surrogatepass"),
            add_special_tokens=head["add_special_tokens"],
            parse_special=head["parse_special"],
        )
    assert model.template is not None  # the gateway checks has_template
    _set_timer(RENDER_SIGNAL, limits.render_s)
    rendered = model.template.render(TemplateInput(**head["conversation"]))
    _set_timer(RENDER_SIGNAL, 0)
    length = len(rendered.text)
    if length > head["max_len"]:  # in characters; tokenizing more would take seconds
        text = f"the chat template writes {length} characters, which exceed the context"
        raise TooLong(text, least_tokens(length))
    _set_timer(PROMPT_SIGNAL, limits.prompt_s)
    return model.tokenizer.encode_rendered(rendered)


def _receive(sock: socket.socket) -> WorkerMessage | None:
    """Return the next message, or None at the end of the stream."""
    with suppress(EOFError, ConnectionError):
        head = head_of(_take(sock, size_of(_take(sock, SIZE_BYTES))))
        return WorkerMessage(head, [_take(sock, size) for size in head["sizes"]])
    return None


def _take(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)


_TIMERS = {
    RENDER_SIGNAL: signal.ITIMER_PROF,
    PROMPT_SIGNAL: signal.ITIMER_VIRTUAL,
    LATE_SIGNAL: signal.ITIMER_REAL,
}


def _set_timer(number: signal.Signals, seconds: float) -> None:
    """Have the kernel send this signal after `seconds`; 0 disables the timer."""
    signal.setitimer(_TIMERS[number], seconds)


def _bound_memory(num_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `num_bytes` bytes."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, hard_limit))


if __name__ == "__main__":
    main()
