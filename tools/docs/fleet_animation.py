"""Record the animated pictures of README: /fleet while chats stream and long prompts arrive.

    PYTHONPATH=tests/support:tools/docs python tools/docs/fleet_animation.py docs/images

Needs Chromium and the extra `docs` (Pillow). Writes fleet-moving.webp and fleet-moving-dark.webp.
"""

import argparse
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from page_images import HEADERS, OPTIONS, model_of, sign_in
from pages.browser import Browser
from PIL import Image
from systems.fleet import Fleet

SIZE = (1180, 760)  # CSS pixels
FRAMES, FRAME_S = 28, 0.5
WARM_S = 15  # of load before the first frame, so that the curves have a shape
CHATS, LONG_WORDS = 4, 1200
QUALITY = 60  # of WebP


class Load:
    """Clients that stream chats without a pause, and one that sends long prompts."""

    def __init__(self, fleet: Fleet) -> None:
        self._url = f"{fleet.url}/v1/completions"
        self._model = model_of(fleet)
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(CHATS + 1)

    def __enter__(self) -> None:
        works = [(f"Story {n}: ", 30, 300) for n in range(CHATS)]
        works.append(("Report: ", LONG_WORDS, 40))
        self._clients = [self._pool.submit(self._repeat, *work) for work in works]

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()

    def _repeat(self, start: str, num_words: int, max_tokens: int) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            prompt = f"{start}{number} " + "ship sea " * (num_words // 2)
            body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens}
            body["ignore_eos"] = True
            reply = httpx.post(self._url, json=body, headers=HEADERS, timeout=300)
            reply.raise_for_status()


def record(page: Browser, path: Path, scheme: str) -> None:
    page.prefer(scheme)
    page.wait(f"document.documentElement.dataset.theme === '{scheme}'")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.png" for number in range(FRAMES)]
        start = time.monotonic()
        for number, file in enumerate(files):
            time.sleep(max(0.0, start + number * FRAME_S - time.monotonic()))
            page.screenshot(file)
        frames = [Image.open(file).convert("RGB") for file in files]
        first, *others = frames
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=round(1000 * FRAME_S),
            loop=0,
            quality=QUALITY,
            method=6,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with Fleet(*OPTIONS, certificates=True) as fleet, Browser() as page:
        sign_in(page, f"{fleet.url}/fleet", "document.querySelector('#workers') !== null")
        page.resize(*SIZE)
        with Load(fleet):
            page.wait("document.querySelectorAll('#open tbody tr').length > 3")
            time.sleep(WARM_S)
            page.run("document.querySelector('#curves').scrollIntoView()")
            record(page, folder / "fleet-moving.webp", "light")
            record(page, folder / "fleet-moving-dark.webp", "dark")


if __name__ == "__main__":
    main()
