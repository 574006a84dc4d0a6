"""A Hugging Face hub on loopback that serves folders, with only the calls of huggingface_hub."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/?]+))?(?:\?.*)?")
TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/?]+)(?:/.*)?(?:\?.*)?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class FakeHub:
    """`requests` lists (method, path) of every request."""

    def __init__(self, repos: Mapping[str, Path], revisions: tuple[str, ...]) -> None:
        self.repos = repos
        self.revisions = revisions
        self.requests: list[tuple[str, str]] = []

    def fetched(self) -> set[str]:
        """Return files whose contents were sent."""
        return {m[3] for how, path in self.requests if how == "GET" and (m := FILE.match(path))}


@contextmanager
def serve(
    repos: Mapping[str, Path], revisions: tuple[str, ...] = ("main",)
) -> Iterator[tuple[str, FakeHub]]:
    """Yield (endpoint, hub) for repositories "org/name" -> folder; at the end all threads are
    joined.
    """
    hub = FakeHub(repos, (*revisions, COMMIT))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, to keep tests quiet."""

        def answer(self) -> None:
            path = unquote(self.path)
            hub.requests.append((self.command, path))
            if match := FILE.fullmatch(path):
                self.file(match[1], match[2], match[3])
            elif match := TREE.fullmatch(path):
                self.tree(match[1], match[2])
            elif match := INFO.fullmatch(path):
                self.info(match[1], match[2] or "main")
            else:
                self.refuse("EntryNotFound")

        def known(self, repo: str, revision: str) -> bool:
            if repo not in hub.repos:
                self.refuse("RepoNotFound")
            elif revision not in hub.revisions:
                self.refuse("RevisionNotFound")
            else:
                return True
            return False

        def info(self, repo: str, revision: str) -> None:
            if self.known(repo, revision):
                names = [{"rfilename": name} for name in files(hub.repos[repo])]
                self.json({"id": repo, "sha": COMMIT, "siblings": names})

        def tree(self, repo: str, revision: str) -> None:
            if self.known(repo, revision):
                found = files(hub.repos[repo]).items()
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                    for name, data in found
                ]
                self.json(entries)

        def file(self, repo: str, revision: str, name: str) -> None:
            if not self.known(repo, revision):
                return
            data = files(hub.repos[repo]).get(name)
            if data is None:
                self.refuse("EntryNotFound")
                return
            self.reply(200, data, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT})

        def json(self, value: object) -> None:
            self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def refuse(self, code: str) -> None:
            self.reply(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True  # clients keep connections open
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", hub
        finally:
            server.shutdown()
            thread.join()


def files(folder: Path) -> dict[str, bytes]:
    """Return path in the repository -> content."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
