"""`pdserve run`: a system and a conversation with its model in one command. When the command ends,
so does the system.

The system runs in a child process with a separate process group, so that Ctrl-C stops an answer
and not the system. The kernel kills that process if this one is killed.
"""

import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NoReturn

from pdserve.cli.chat import Conversation, converse, first_model
from pdserve.cli.chat_terminal import hidden_keys, view_on
from pdserve.cli.commands import STOPPED
from pdserve.cli.http_client import ApiClient, ApiError
from pdserve.cli.options import CommandError, OptionError, RunSettings, Settings
from pdserve.cli.up.stop_limit import stop_limit_s
from pdserve.services.common.process import die_with

SEPARATOR = "|"
KILL_S = 10.0  # time for the system to kill its processes after its own limit


def run(settings: Settings, positionals: Mapping[str, Any]) -> int:
    """Start a system, answer the questions of the command line or those that the user types, and
    stop it. Returns the exit code. Raises OptionError if options of the system contradict each
    other, CommandError if it does not start."""
    run_settings = settings.build(RunSettings)
    prompts = [text.strip() for text in run_settings.prompts.split(SEPARATOR) if text.strip()]
    prompts += [" ".join(positionals["prompt"])] if positionals["prompt"] else []
    key = ""
    keys = settings.values["api_key"].value
    if keys or settings.values["api_key_file"].value:  # these may be only hashes of keys
        key = secrets.token_urlsafe()
        settings = settings.override(api_key=(*keys, key))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with system(settings) as url:
        client = ApiClient(url, key)
        model = first_model(client, "")
        if prompts:
            return answer(prompts, lambda: Conversation(client, model, run_settings))
        return converse(Conversation(client, model, run_settings), run_settings.history)


def answer(prompts: Sequence[str], begin: Callable[[], Conversation]) -> int:
    """Print the answer to each prompt, each in a separate conversation; return 1 if one failed, and
    STOPPED if Ctrl-C stopped one."""
    code = 0
    for prompt in prompts:
        if len(prompts) > 1:
            print(f"> {prompt}", flush=True)
        try:
            with hidden_keys():
                if not begin().ask(prompt, view_on(sys.stdout, False)):
                    return STOPPED
        except ApiError as error:
            print(f"error: {error}{error.advice}", file=sys.stderr, flush=True)
            code = 1
    return code


@contextmanager
def system(settings: Settings) -> Iterator[str]:
    """Run a system during the block; yield the URL at which this process reaches it. Raises
    OptionError if options contradict each other, CommandError if it ends before it is ready."""
    given = {name for name, value in settings.values.items() if value.given}
    with tempfile.TemporaryDirectory(prefix="pdserve-run-") as folder:
        path = settings.values["unix_socket"].value or str(Path(folder, "api"))
        changed = {"unix_socket": path, "port": 0, "log_level": "warning", "database_url": "none"}
        changed = {name: value for name, value in changed.items() if name not in given}
        context = multiprocessing.get_context("spawn")
        ready, report = context.Pipe(duplex=False)
        child = context.Process(
            target=serve, args=(settings.override(**changed), os.getpid(), report)
        )
        child.start()
        report.close()  # so that `recv` ends with the child
        try:
            try:
                outcome = ready.recv()
            except EOFError:
                raise CommandError("the system has not started") from None
            if isinstance(outcome, OptionError):
                raise outcome
            yield f"unix:{path}"
        finally:
            stop(child, stop_limit_s(settings.values["drain_s"].value) + KILL_S)


def stop(child: SpawnProcess, limit_s: float) -> None:
    """Stop the system, and wait until all its processes have ended. A second Ctrl-C kills them, and
    so does the end of `limit_s`."""
    if child.pid and child.is_alive():
        os.kill(child.pid, signal.SIGTERM)
    try:
        child.join(limit_s)
    finally:
        child.kill()
        child.join()


def serve(settings: Settings, parent: int, report: Connection) -> NoReturn:
    """Run the system in this process; send its URL to `report` when it is ready, or the
    OptionError that prevents its start."""
    os.setpgid(0, 0)
    die_with(parent)
    from pdserve.cli.up import command

    try:
        code = command.serve(settings, report.send)
    except OptionError as error:
        report.send(error)
        code = 2
    sys.exit(code)
