"""A headless Chromium, driven over its debugging pipe, without a driver or WebSocket."""

import base64
import fcntl
import gzip
import json
import os
import select
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from systems.eventually import LIMIT_S, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WHY_NOT = "there is no Chromium; .ci/run installs it"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
AXE = Path(__file__).parent / "axe/axe.min.js.gz"
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
DESKTOP, PHONE = (1280, 800), (390, 844)


class PageError(Exception):
    """A script on the page has thrown, or the browser has refused a command."""


class Browser:
    """Context manager for one page: `with Browser() as browser`. Its calls wait for Chromium's
    answer.
    """

    def __enter__(self) -> "Browser":
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_theirs, self._write = os.pipe()
        self._read, write_theirs = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        # Chromium reads from descriptor 3 and writes to 4; those of the pipes may be the same.
        script = 'exec "$@" 3<&"$IN" 4>&"$OUT"'
        theirs = (read_theirs, write_theirs)
        spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in theirs]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            env={**os.environ, "IN": str(spare[0]), "OUT": str(spare[1])},
            pass_fds=spare,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (*theirs, *spare):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []  # errors, of scripts and of the content policy
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(*DESKTOP)
        self.prefer("light")
        return self

    def __exit__(self, *exc: object) -> None:
        self._session = None
        with suppress(OSError, EOFError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol. Raises PageError."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                if "error" in found:
                    raise PageError(f"{method}: {found['error']['message']}")
                return found["result"]
            self._note(found)

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], LIMIT_S)[0]:
                raise TimeoutError(f"Chromium says nothing for {LIMIT_S:g} s")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise EOFError("Chromium has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: Any) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            shown = details.get("exception", {}).get("description", details["text"])
            self.console.append(shown)
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            said = [one.get("description", one.get("value")) for one in params["args"]]
            self.console.append(" ".join(map(str, said)))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.console.append(f"{entry['text']} {entry.get('url', '')}")

    # --- user actions

    def open(self, url: str) -> None:
        """Load a page and the files that it names."""
        self._load("Page.navigate", url=url)

    def reload(self) -> None:
        """Load the page again."""
        self._load("Page.reload")

    def _load(self, method: str, **params: Any) -> None:
        self.run("window.isOld = true")
        self.call(method, **params)
        self.wait("!window.isOld && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of a promise. Raises PageError."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of an expression, once it is true."""

        def holds() -> Any:
            try:
                return self.run(script)
            except PageError:  # the page is loading
                return None

        return wait_until(holds, lambda: f"{script}\n{self.text()}\n{self.console}", pause_s=0.05)

    def wait_console(self, text: str) -> None:
        """Wait until an error with this text has been reported."""
        wait_until(lambda: self.run("1") and any(text in line for line in self.console), text)

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element; empty if it is not there."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Press the mouse on the element's middle."""
        place = self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "if (!e) return null; e.scrollIntoView({block: 'nearest'});"
            "const b = e.getBoundingClientRect();"
            "return b.width && [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def choose(self, selector: str, *paths: Path) -> None:
        """Choose files in a field for files."""
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        field = self.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=field, files=[str(path) for path in paths])

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        how = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        typed = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **typed, **how)
        self.call("Input.dispatchKeyEvent", type="keyUp", **how)

    def fill(self, selector: str, text: str) -> None:
        """Replace the contents of a field, and leave it."""
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f"e.focus(); e.value = {json.dumps(text)};"
            "for (const kind of ['input', 'change'])"
            "e.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    # --- display of the page

    def resize(self, width: int, height: int) -> None:
        """Resize the page; a phone's width emulates a phone."""
        shown = {"width": width, "height": height, "mobile": width < 800}
        factor = 2 if width < 800 else 1
        self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=factor, **shown)

    def prefer(self, scheme: str) -> None:
        """Set the system's colors: light or dark. Animations are off, so that tests need not wait
        for them.
        """
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def violations(self, *impacts: str) -> list[str]:
        """Return axe-core's findings with these impacts (by default serious and critical ones)."""
        if self.run("typeof axe") == "undefined":
            self.run(gzip.decompress(AXE.read_bytes()).decode() + ";0")
        found = json.loads(self.run("axe.run().then((r) => JSON.stringify(r.violations))"))
        wanted = impacts or ("serious", "critical")
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found
            if one["impact"] in wanted
            for node in one["nodes"]
        ]
