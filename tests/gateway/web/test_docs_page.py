"""The page of the API in a browser."""

import json
from itertools import product
from pathlib import Path

import pytest
from pages.browser import CHROMIUM, DESKTOP, PHONE, WHY_NOT, Browser
from systems.eventually import wait_until
from systems.served_gateway import served_gateway

pytestmark = [pytest.mark.extended, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]


def test_the_page_asks_for_a_key_and_sends_it(browser: Browser, tmp_path: Path) -> None:
    page = browser
    with served_gateway(api_keys=("right",), root_path="/llm") as url:
        page.console.clear()
        page.open(f"{url}/llm/docs")
        state = "document.querySelector('#key-state').innerText.includes('{}')"
        page.wait(state.format("asks for an API key"))
        assert page.run("document.querySelector('#document').checkVisibility()") is False
        page.fill("#key", "wrong")
        page.press("Enter")
        page.wait(state.format("not valid"))
        page.fill("#key", "right")
        page.press("Enter")
        page.wait("document.querySelectorAll('.opblock-tag').length === 8")
        # The link has the document itself: a request for it would go without the key.
        page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        page.click("#document")
        file = tmp_path / "openapi.json"
        wait_until(file.exists, "the file")
        assert json.loads(file.read_text())["openapi"].startswith("3.1")
        for scheme, size in product(("light", "dark"), (DESKTOP, PHONE)):
            page.prefer(scheme)
            page.resize(*size)
            is_dark = "document.documentElement.classList.contains('dark-mode')"
            page.wait(f"{is_dark} === {json.dumps(scheme == 'dark')}")
            assert page.violations() == [], (scheme, size)
            assert page.run("document.documentElement.scrollWidth") == size[0]
        page.resize(*DESKTOP)
        page.prefer("light")
        page.run("document.querySelector('[id$=version_version_get] button').click()")
        for button in (".try-out button", ".execute"):
            page.wait(f"document.querySelector('{button}') !== null")
            page.run(f"document.querySelector('{button}').click()")
        page.wait("document.querySelector('.live-responses-table') !== null")
        assert '"version"' in page.text(".live-responses-table")  # not a 401
        page.open(f"{url}/llm")  # the key is that of all pages
        page.wait("document.querySelector('#model').value === 'tiny'")
        assert [line for line in page.console if "401" not in line] == []
