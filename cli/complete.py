"""`pdserve complete IN OUT` sends the requests in a file, several at once, and writes one result
per line.

An input line is like those of OpenAI's batches (custom_id, url, body), or a body with "prompt" or
"messages" and optionally an "id". The output file is also the state of the run: a line that has a
result is not sent again. Each result is appended with one write, so that a run may end at any time;
the next run removes a last line that is incomplete because of a full disk or a crash. A lock on the
output file excludes a second run.

Only a response that decides on the request is a result. If the server is busy or unreachable, the
request is retried; if that does not help, the run ends.
"""

import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.commands import STOPPED
from pdserve.cli.http_client import ApiError
from pdserve.cli.options import CompleteSettings, Settings
from pdserve.cli.progress import ProgressView, progress_on

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (PLAIN, CHAT, "/v1/embeddings", "/v1/responses")
IDS = ("custom_id", "id")
RETRIED_STATUSES = (408, 429, 502, 503, 504)  # the server is busy or unreachable: not a result
PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # before a line is retried


class BadLine(Exception):
    """Raised if a line of the input file is not a valid request, or if the files cannot be used;
    the message says why."""


def line_id(line: Mapping[str, Any], number: int) -> str:
    """Return the id in an input line (custom_id or id), or "line-N" for line number N (from 1) if
    it has none."""
    for name in IDS:
        if isinstance(line.get(name), str | int) and line[name] != "":
            return str(line[name])
    return f"line-{number}"


def parse_line(data: bytes) -> Mapping[str, Any]:
    """Parse an input line as a JSON object. Raises BadLine if it is not one."""
    try:
        line = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the line is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise BadLine("the line is not a JSON object")
    return line


def request_of(line: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL path and the body of an input line's request. `defaults` are fields for bodies
    that lack them. Raises BadLine if the line contains no valid request."""
    if "body" in line:
        body, url = line["body"], line.get("url", CHAT)
        if not isinstance(body, dict):
            raise BadLine("body must be a JSON object")
        if url not in URLS:
            raise BadLine(f"url must be one of {', '.join(URLS)}, not {str(url)[:80]!r}")
    elif "messages" in line or "prompt" in line:
        body = {name: value for name, value in line.items() if name not in IDS}
        url = CHAT if "messages" in line else PLAIN
    else:
        raise BadLine('the line has neither "body" nor "messages" nor "prompt"')
    return url, {**defaults, **body, "stream": False}


def answer_line(custom_id: str, status: int, body: Any) -> dict[str, Any]:
    """Make the result of an input line for which the server has sent a response, of any status."""
    return {
        "custom_id": custom_id,
        "response": {"status_code": status, "body": body},
        "error": None,
    }


def error_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Make the result of an input line that is not a valid request and was not sent."""
    return {"custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def failed(result: Mapping[str, Any]) -> bool:
    response = result.get("response")
    return not response or response.get("status_code") != 200


class ResultError(Exception):
    """Raised if a run cannot use the output file, because another run is writing to it or because
    it contains something else; the message says which."""


class ResultFile:
    """The output file of a run, locked while it is open. `done` are the ids of the lines with a
    result."""

    def __init__(self, path: Path) -> None:
        """Open, lock and read the output file. Raises OSError if that fails; ResultError if another
        run is writing to it, or if it contains lines that are not results."""
        self._path = path
        self.done: set[str] = set()
        self.num_failed = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    def add(self, result: Mapping[str, Any]) -> None:
        """Append a result. Raises OSError if it cannot be written; the file then still ends with a
        complete line."""
        data = (json.dumps(result, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):  # the disk is full
                os.write(self._descriptor, data[written:])
        except OSError:
            os.ftruncate(self._descriptor, end)
            raise
        self.done.add(str(result["custom_id"]))
        self.num_failed += failed(result)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultError(
                f"{self._path}: another `pdserve complete` is writing to this file"
            ) from None

    def _read(self) -> None:
        """Read the ids of the lines that have a result, and remove an incomplete last line. Raises
        ResultError if a line is not a result."""
        end = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                if line.strip():
                    self._add_line(line, number)
            size = file.seek(0, os.SEEK_END)
            if size > end:
                file.seek(end)
                if file.read(1) != b"{":
                    raise ResultError(
                        f"{self._path}: its last line is not a result; choose a new output file"
                    )
        if size > end:
            os.ftruncate(self._descriptor, end)

    def _add_line(self, line: bytes, number: int) -> None:
        try:
            result = json.loads(line)
            custom_id, response, _ = (result[name] for name in ("custom_id", "response", "error"))
        except (ValueError, KeyError, TypeError):
            custom_id = response = None
        if not isinstance(custom_id, str) or not isinstance(response, dict | None):
            raise ResultError(
                f"{self._path}: line {number} is not a result; choose a new output file"
            )
        if custom_id in self.done:
            raise ResultError(
                f"{self._path}: line {number} is another result with the id {custom_id!r}"
            )
        self.done.add(custom_id)
        self.num_failed += failed(result)


class Stopped(Exception):
    """Raised if Ctrl-C or SIGTERM stopped the run."""


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve complete`. Returns 0 if every request succeeded, 1 if one failed or the run
    could not continue, STOPPED after Ctrl-C."""
    options = settings.build(CompleteSettings)
    source, target = Path(positionals["in"]), Path(positionals["out"])
    view = progress_on(sys.stderr)
    try:
        check_source(source, target)
        with ResultFile(target) as results:
            total = count(source, results.done, target)
            try:
                asyncio.run(FileRun(options, results, view, target.name, total).run(source))
            finally:
                view.close()
                say(f"{target}: {len(results.done)} of {total} lines, {results.num_failed} failed")
            return 1 if results.num_failed else 0
    except Stopped:
        say("stopped; run the same command again to resume")
        return STOPPED
    except ApiError as error:
        say(f"pdserve complete: {error}{error.advice}")
        say("run the same command again to resume once the server responds")
    except (OSError, ResultError, BadLine) as error:
        say(f"pdserve complete: {error}")
    finally:
        view.close()
    return 1


def check_source(source: Path, target: Path) -> None:
    """Check the input and the output file before anything is written. Raises BadLine if one is not
    a regular file, since both are read more than once, or if they are the same file; OSError if the
    input cannot be read."""
    for path in (source, target):
        if path.exists() and not path.is_file():
            raise BadLine(f"{path} is not a regular file")
    source.open("rb").close()
    if target.exists() and target.samefile(source):
        raise BadLine(f"the output file {target} is also the input file")


def count(source: Path, done: set[str], target: Path) -> int:
    """Return the number of input lines. Raises BadLine if two lines have the same id, or if an id
    in `done` (a result in the output file `target`) belongs to no input line."""
    line_numbers: dict[str, int] = {}
    for number, custom_id, _ in lines_of(source):
        if custom_id in line_numbers:
            raise BadLine(
                f"{source}: lines {line_numbers[custom_id]} and {number} have the same id "
                f"{custom_id!r}"
            )
        line_numbers[custom_id] = number
    if unknown_id := next((result_id for result_id in done if result_id not in line_numbers), None):
        raise BadLine(
            f"{target} has a result with id {unknown_id!r}, which {source} does not have: choose a "
            "new output file"
        )
    return len(line_numbers)


def lines_of(source: Path) -> Iterator[tuple[int, str, Mapping[str, Any] | BadLine]]:
    """Yield (line number from 1, id, parsed line or BadLine) for each line of the input file that
    is not blank."""
    with source.open("rb") as file:
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                line = parse_line(data)
                yield number, line_id(line, number), line
            except BadLine as error:
                yield number, f"line-{number}", error


class FileRun:
    """Sends the requests of all input lines that have no result yet, `concurrency` at once, and
    adds their results to the output file."""

    def __init__(
        self,
        options: CompleteSettings,
        results: ResultFile,
        view: ProgressView,
        name: str,
        total: int,
    ) -> None:
        """`name` and `total` (number of lines) are for the progress view. Raises ApiError if the
        URL in the options is malformed."""
        self._api = AsyncApi(options, options.timeout_s)
        self._options = options
        self._results = results
        self._view = view
        self._name = name
        self._total = total

    async def run(self, source: Path) -> None:
        """Send requests until every input line has a result. Raises ApiError if the server is busy
        or unreachable for too long, OSError if a file fails, Stopped after Ctrl-C or SIGTERM; no
        request is sent after that."""
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(self._work(source))
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            work.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            await work
        except asyncio.CancelledError:
            if stopped:
                raise Stopped from None
            raise
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._api.close()

    async def _work(self, source: Path) -> None:
        defaults = await self._defaults()
        waiting = lines_of(source)  # shared: each worker takes the next line
        self._show()

        async def worker() -> None:
            for _, custom_id, line in waiting:
                if custom_id in self._results.done:
                    continue
                try:
                    if isinstance(line, BadLine):
                        raise line
                    result = await self._send(custom_id, *request_of(line, defaults))
                except BadLine as error:
                    result = error_line(custom_id, "invalid_line", str(error))
                self._results.add(result)
                self._show()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.concurrency):
                group.create_task(worker())

    async def _defaults(self) -> dict[str, Any]:
        """Return the fields for request bodies that lack them: model, max_tokens, temperature.
        Raises ApiError if no model is set and the server lists none."""
        options = self._options
        defaults: dict[str, Any] = {"model": options.model or await self._api.first_model()}
        if options.max_tokens:
            defaults["max_tokens"] = options.max_tokens
        if options.temperature >= 0:
            defaults["temperature"] = options.temperature
        return defaults

    async def _send(self, custom_id: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send an input line's request; return the line's result. Retries while the server is busy
        or unreachable. Raises ApiError if that does not end, or if the server does not accept the
        API key."""
        for pause_s in (*PAUSES_S, None):
            try:
                response = await self._api.post(path, body)
                is_busy = response.status in RETRIED_STATUSES
                if response.status == 401 or (is_busy and pause_s is None):
                    response.check()
                if not is_busy:
                    with suppress(ApiError):
                        return answer_line(custom_id, response.status, response.json)
                    text = response.body.decode(errors="replace")
                    return answer_line(custom_id, response.status, text)
                pause_s = max(pause_s or 0.0, response.retry_after_s)
            except ApiError as error:
                if error.status == 401 or pause_s is None:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last try of a request returns or raises")

    def _show(self) -> None:
        self._view.update(self._name, len(self._results.done) / max(1, self._total))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
