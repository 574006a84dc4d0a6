"""Line 2: both pages in headless Chromium: the tests of tests/gateway/web, with axe-core, none of
them skipped, and a running system with the shipped model.

In the system, a script sends a prompt, sees the answer streamed, stops one, reloads and finds it
again; the live view shows the requests and follows a killed worker and its replacement.
--screenshots writes pictures of both pages into a folder (docs/images has those of the documents).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from pages.browser import CHROMIUM, DESKTOP, PHONE, WHY_NOT, Browser
from systems.fleet import Fleet

ROOT = Path(__file__).parents[2]
QUESTIONS = (
    "What is a lighthouse for? Answer in two sentences.",
    "Name three planets, as a Markdown list.",
)
SAMPLING = {"temperature": "0.2", "top_p": "0.9", "seed": "1", "max_tokens": "120"}
TALL = (DESKTOP[0], 1080)
LONG = "Write a long story about a lighthouse."
LAST = ".message:last-child"
OPTIONS = ("--decode", "2", "--prefill", "1", "--api-key", "KEY")
HEADERS = {"authorization": "Bearer KEY"}


def tests() -> dict[str, int]:
    """The numbers of passed, failed and skipped tests of the pages."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/gateway/web"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:], file=sys.stderr)
    words = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.splitlines()[-1])
    return {word: int(number) for number, word in words}


def sign_in(page: Browser, url: str, ready: str) -> None:
    page.open(url)
    page.wait("document.querySelector('#key-dialog').open")
    page.fill("#asked-key", "KEY")
    page.press("Enter")
    page.wait(ready)


def ask(page: Browser, text: str) -> None:
    page.click("#prompt")
    page.type(text)
    page.press("Enter")


def answered(page: Browser, number: int) -> str:
    page.wait(
        f"document.querySelectorAll('.message.assistant[aria-busy=false]').length === {number}"
    )
    return page.text(f"{LAST} .answer")


class Line:
    """The line; `found` has the results of each step."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}

    def picture(self, page: Browser, name: str, desktop: tuple[int, int] = DESKTOP) -> None:
        """Take pictures in light and dark mode on a desktop, and on a phone; check each with
        axe."""
        found = []
        for suffix, size, scheme in (
            ("", desktop, "light"),
            ("-dark", desktop, "dark"),
            ("-phone", PHONE, "light"),
            ("-phone-dark", PHONE, "dark"),
        ):
            page.resize(*size)
            page.prefer(scheme)
            page.wait(f"document.documentElement.dataset.theme === '{scheme}'")
            found += page.violations()
            if self.folder is not None:
                page.screenshot(self.folder / f"{name}{suffix}.png")
        page.resize(*DESKTOP)
        page.prefer("light")
        self.found[f"{name}_serious_findings"] = found

    def chat(self, page: Browser, fleet: Fleet) -> None:
        sign_in(page, f"{fleet.url}/", "document.querySelector('#model').value !== ''")
        for name, value in SAMPLING.items():
            page.fill(f"#{name}", value)
        for number, question in enumerate(QUESTIONS, 1):
            ask(page, question)
            answer = answered(page, number)
            assert answer, "no answer"
        self.found["answers"] = len(QUESTIONS)
        self.picture(page, "chat")
        page.fill("#max_tokens", "")
        ask(page, LONG)
        page.wait(f"document.querySelector('{LAST} .answer').innerText.length > 40")
        page.press("Escape")
        stopped = answered(page, len(QUESTIONS) + 1)
        assert "stopped" in page.text(f"{LAST} .facts")
        self.found["stopped_after_characters"] = len(stopped)
        page.reload()
        page.wait(f"document.querySelectorAll('.message').length === {2 * len(QUESTIONS) + 2}")
        assert page.text(f"{LAST} .answer") == stopped
        self.found["reload_keeps"] = True

    def fleet_view(self, page: Browser, fleet: Fleet) -> None:
        live = "[...document.querySelectorAll('.worker[data-state=live]')]"
        page.open(f"{fleet.url}/fleet")  # the key belongs to the tab
        page.wait(f"{live}.length === 3")
        page.wait("document.querySelectorAll('#ended tbody tr').length >= 3")
        load = [threading.Thread(target=_stream, args=(fleet, n), daemon=True) for n in range(4)]
        for thread in load:
            thread.start()
        page.wait("document.querySelectorAll('#open tbody tr').length >= 3")
        self.found["open_phases"] = sorted(
            set(page.run("[...document.querySelectorAll('#open .phase')].map((e) => e.innerText)"))
        )
        self.picture(page, "fleet", TALL)
        for thread in load:
            thread.join()
        before = page.run(f"{live}.map((e) => e.dataset.boot)")
        victim = fleet.pids("decode")[0]
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        # The page may poll only after the replacement has joined, but it still shows the lost
        # worker.
        page.wait("document.querySelectorAll('.worker[data-state=gone]').length === 1")
        self.found["lost_worker_shown_after_s"] = round(time.monotonic() - began, 2)
        page.wait(f"{live}.length === 3")
        self.found["new_worker_shown_after_s"] = round(time.monotonic() - began, 2)
        after = page.run(f"{live}.map((e) => e.dataset.boot)")
        assert len(set(before) & set(after)) == 2


def _stream(fleet: Fleet, number: int) -> None:
    text = f"Story {number}: " + "once upon a time there was a sea and a ship. " * 30
    body = {"model": _model(fleet), "prompt": text, "max_tokens": 1500, "ignore_eos": True}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=HEADERS, timeout=300)
    answer.raise_for_status()


def _model(fleet: Fleet) -> str:
    found = httpx.get(f"{fleet.url}/v1/models", headers=HEADERS).raise_for_status().json()
    return str(found["data"][0]["id"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path)
    parser.add_argument("--no-tests", action="store_true", help="the running system alone")
    options = parser.parse_args()
    if CHROMIUM is None:
        print(json.dumps({"ok": True, "skipped": WHY_NOT}))
        return 0
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    line = Line(options.screenshots)
    counts = {} if options.no_tests else tests()
    errors: list[str] = []
    with Fleet(*OPTIONS, certificates=True) as fleet, Browser() as page:
        try:
            line.chat(page, fleet)
            line.fleet_view(page, fleet)
        except (AssertionError, TimeoutError) as error:
            errors.append(f"{type(error).__name__}: {error}"[:2000])
        console = [text for text in page.console if "401" not in text]
    found = line.found | {"tests": counts, "errors": errors, "console": console}
    serious = [one for key, ones in found.items() if key.endswith("_findings") for one in ones]
    passed = options.no_tests or (counts.get("passed", 0) > 0 and set(counts) == {"passed"})
    ok = passed and not errors and not console and not serious
    print(json.dumps({"ok": ok, **found}))
    return not ok


if __name__ == "__main__":
    sys.exit(main())
