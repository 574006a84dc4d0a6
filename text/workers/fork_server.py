"""The fork server process of one model: it loads the model's tokenizer and chat template, and forks
tokenizer workers, which share the loaded memory.

A model's files are untrusted: a single operation (a regular expression, a comparison of nested
lists) can exhaust the memory or never end. The files are therefore used only in these processes,
under limits that the kernel enforces: the signal of a timer kills a worker that exceeds a time
limit. A process handles one message at a time and has one thread.
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
    """Run the fork server until the gateway closes the socket or ends. Command-line arguments: the
    file descriptor of the socket, WorkerLimits as JSON, and the format of log lines."""
    show_as("tokenizer")
    configure_logging("tokenizer", log_format=sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    control = socket.socket(fileno=int(sys.argv[1]))
    with suppress(ConnectionError):  # the gateway is gone
        _serve(control, WorkerLimits(**json.loads(sys.argv[2])))


def _probe(model: TextModel, limits: WorkerLimits) -> None:
    """Find out in a child process what the chat template can render, under the limits of a prompt.
    If the template exceeds them, it gets default capabilities, and its prompts will fail."""
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
    """Return the message that describes the loaded model to the gateway, which builds a
    LoadedTokenizer from it."""
    tokens = map(model.tokenizer.token_name, range(model.tokenizer.model_info.vocab_size))
    head = {
        "decoder": model.tokenizer.decoder,
        "special_ids": sorted(model.tokenizer.special.ids),
        "frames": asdict(model.tokenizer.frames),
        "has_template": model.template is not None,
        "tool_parser": model.tool_parser,
        "reasoning_parser": model.reasoning_parser,
        "defaults": asdict(model.defaults),
    }
    return WorkerMessage(head, store_tokens(list(tokens)))


def _serve(control: socket.socket, limits: WorkerLimits) -> None:
    """Receive a model's files and load them, answer with a description or an error, then fork
    workers on demand. Raises ConnectionError if the gateway has ended."""
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
    """Fork a tokenizer worker for each socket that the gateway sends, and report the exit code of
    each worker that ends. Raises ConnectionError if the gateway has ended."""
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
    """Run a tokenizer worker: answer messages until the gateway closes the socket, or until an
    error after which this process should not continue, such as a lack of memory."""
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
    """Do the work of one message (a grammar, texts or a prompt) and return the answer. Raises
    TextError if the work cannot be done."""
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
    """Render (for a chat) and tokenize the prompt of a message; return its token ids. Raises
    TextError if it is invalid or, as rendered, too long."""
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
    """Wait for the next message and return it; None if the other end has closed the socket."""
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
    """Let the kernel send a signal to this process after `seconds` of the time that the signal's
    timer measures (CPU or wall time); 0 disables the timer."""
    signal.setitimer(_TIMERS[number], seconds)


def _bound_memory(num_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `num_bytes` bytes."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, hard_limit))


if __name__ == "__main__":
    main()
