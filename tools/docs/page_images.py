"""Take the pictures of the pages for docs/images, in headless Chromium, from a running system with
the shipped model.

    PYTHONPATH=tests/support python tools/docs/page_images.py docs/images
"""

import argparse
import threading
from pathlib import Path

import httpx
from pages.browser import DESKTOP, PHONE, Browser
from systems.fleet import Fleet

QUESTIONS = (
    "What is a lighthouse for? Answer in two sentences.",
    "Name three planets, as a Markdown list.",
)
SAMPLING = {"temperature": "0.2", "top_p": "0.9", "seed": "1", "max_tokens": "120"}
TALL = (DESKTOP[0], 1080)
OPTIONS = ("--decode", "2", "--prefill", "1", "--api-key", "KEY")
HEADERS = {"authorization": "Bearer KEY"}


def sign_in(page: Browser, url: str, ready: str) -> None:
    page.open(url)
    page.wait("document.querySelector('#key-dialog').open")
    page.fill("#api-key", "KEY")
    page.press("Enter")
    page.wait(ready)


def ask(page: Browser, text: str) -> None:
    page.click("#prompt")
    page.type(text)
    page.press("Enter")


def take(page: Browser, folder: Path, name: str, desktop: tuple[int, int] = DESKTOP) -> None:
    """Take pictures in light and dark mode, on a desktop and on a phone."""
    for suffix, size, scheme in (
        ("", desktop, "light"),
        ("-dark", desktop, "dark"),
        ("-phone", PHONE, "light"),
        ("-phone-dark", PHONE, "dark"),
    ):
        page.resize(*size)
        page.prefer(scheme)
        page.wait(f"document.documentElement.dataset.theme === '{scheme}'")
        page.screenshot(folder / f"{name}{suffix}.png")
    page.resize(*DESKTOP)
    page.prefer("light")


def take_chat(page: Browser, fleet: Fleet, folder: Path) -> None:
    sign_in(page, f"{fleet.url}/", "document.querySelector('#model').value !== ''")
    for name, value in SAMPLING.items():
        page.fill(f"#{name}", value)
    for number, question in enumerate(QUESTIONS, 1):
        ask(page, question)
        page.wait(
            f"document.querySelectorAll('.message.assistant[aria-busy=false]').length === {number}"
        )
    take(page, folder, "chat")


def take_fleet(page: Browser, fleet: Fleet, folder: Path) -> None:
    page.open(f"{fleet.url}/fleet")  # the key belongs to the tab
    load = [threading.Thread(target=_stream, args=(fleet, n), daemon=True) for n in range(4)]
    for thread in load:
        thread.start()
    page.wait("document.querySelectorAll('#open tbody tr').length >= 3")
    page.wait("document.querySelector('.curve-line').getAttribute('d').split('L').length > 15")
    take(page, folder, "fleet", TALL)
    for thread in load:
        thread.join()


def _stream(fleet: Fleet, number: int) -> None:
    text = f"Story {number}: " + "once upon a time there was a sea and a ship. " * 30
    body = {"model": model_of(fleet), "prompt": text, "max_tokens": 1500, "ignore_eos": True}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=HEADERS, timeout=300)
    answer.raise_for_status()


def model_of(fleet: Fleet) -> str:
    found = httpx.get(f"{fleet.url}/v1/models", headers=HEADERS).raise_for_status().json()
    return str(found["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with Fleet(*OPTIONS, certificates=True) as fleet, Browser() as page:
        take_chat(page, fleet, folder)
        take_fleet(page, fleet, folder)


if __name__ == "__main__":
    main()
