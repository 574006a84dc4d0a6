"""The live view of the fleet in a browser."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import httpx
import pytest
from pages.browser import CHROMIUM, DESKTOP, PHONE, WHY_NOT, Browser
from pages.chat_model import ChatModel
from systems.served_gateway import served_gateway

from pdserve.protos import fleet_pb2, router_pb2

pytestmark = [pytest.mark.extended, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]


def worker(role: int, name: str) -> router_pb2.WorkerView:
    hello = fleet_pb2.WorkerHello(
        role=role, incarnation=name.encode(), address=f"127.0.0.1:{1000 + len(name)}"
    )
    hello.card.name = "tiny"
    load = fleet_pb2.Load(
        running=3, blocks_total=10, blocks_free=4, blocks_used=3, blocks_cached=2, blocks_reserved=1
    )
    return router_pb2.WorkerView(hello=hello, load=load, state="live")


@dataclass(frozen=True)
class Shown:
    page: Browser
    router: ChatModel
    url: str


@pytest.fixture
def shown(browser: Browser) -> Iterator[Shown]:
    """The page with two workers."""
    routers: list[ChatModel] = []

    def make() -> ChatModel:
        routers.append(ChatModel())
        assert routers[0].view is not None
        del routers[0].view.workers[:]
        both = [worker(fleet_pb2.DECODE, "one"), worker(fleet_pb2.PREFILL, "four")]
        routers[0].view.workers.extend(both)
        return routers[0]

    page = browser
    page.open("about:blank")
    page.console.clear()
    with served_gateway(make) as url:
        page.resize(*DESKTOP)
        page.prefer("light")
        page.open(f"{url}/fleet")
        page.wait("document.querySelectorAll('.worker').length === 2")
        yield Shown(page, routers[0], url)
        page.open("about:blank")
        assert page.console == []


def ask(url: str, text: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).raise_for_status()


def test_workers_are_shown_and_lost_ones_removed(shown: Shown) -> None:
    page, view = shown.page, shown.router.view
    assert view is not None
    assert "decode" in page.text(".worker").lower()
    assert "3 used, 1 reserved, 2 cached, 4 free" in page.text(".worker")
    shares = page.run(
        "[...document.querySelector('.blocks').children].map((e) => parseFloat(e.style.width))"
    )
    assert shares == [30, 10, 20]
    view.workers[1].state = "suspect"
    page.wait("document.querySelector('[data-state=suspect]') !== null")
    del view.workers[1]
    page.wait("document.querySelectorAll('.worker[data-state=gone]').length === 1")
    assert "is gone" in page.run("document.querySelector('#status').textContent")
    view.workers.append(worker(fleet_pb2.PREFILL, "seven"))
    page.wait("document.querySelectorAll('.worker[data-state=live]').length === 2")


def test_open_requests_are_shown_and_then_their_phases(shown: Shown) -> None:
    page, url = shown.page, shown.url
    assert "No request of yours has ended yet" in page.text()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "long"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()  # held open until the response is released
        next(lines)
        page.wait("document.querySelector('#open .phase')?.innerText === 'decode'")
        assert "d:1" in page.text("#open")
    page.wait("document.querySelector('#ended .failed')?.innerText === 'cancelled'")
    ask(url, "hello")
    page.wait("document.querySelectorAll('#ended tbody tr').length === 2")
    row = page.run("document.querySelector('#ended tbody tr').textContent")
    for phase in ("queue 10 ms", "prefill 20 ms", "KV transfer 3 ms", "first token 4 ms"):
        assert phase in row
    assert page.run("document.querySelector('#no-open').hidden") is False


def test_curves_show_the_last_minutes(shown: Shown) -> None:
    page, view = shown.page, shown.router.view
    assert view is not None
    names = "[...document.querySelectorAll('.curve dt')].map((e) => e.innerText)"
    assert page.run(names) == ["Tokens/s", "Running", "Waiting", "KV held"]
    view.workers[0].load.waiting = 7
    waiting = "document.querySelectorAll('.curve')[2]"
    page.wait(f"{waiting}.querySelector('dd').innerText.startsWith('7')")
    view.workers[0].load.waiting = 1
    page.wait(f"{waiting}.querySelector('dd').innerText.replace(/\\s+/g, ' ') === '1 highest 7'")
    label = page.run(f"{waiting}.querySelector('svg').getAttribute('aria-label')")
    assert label == "Waiting over the last 5 minutes: now 1, highest 7"
    heights = page.run(
        f"{waiting}.querySelector('.curve-line').getAttribute('d').split(/[ML]/).slice(1)"
        ".map((point) => parseFloat(point.split(' ')[1]))"
    )
    assert min(heights) == 2.0  # the highest value is at the top of the picture
    assert heights[-1] == pytest.approx(48 - 46 / 7, abs=0.1)
    view.workers[0].load.generation_tokens += 1000
    page.wait("parseInt(document.querySelector('.curve dd').innerText.replace(',', '')) > 100")


def test_the_way_of_a_request_is_drawn(shown: Shown) -> None:
    page = shown.page
    ask(shown.url, "hello")
    page.wait("document.querySelectorAll('#ended tbody tr').length === 1")
    for scheme, size in product(("light", "dark"), (DESKTOP, PHONE)):
        page.prefer(scheme)
        page.resize(*size)
        page.run("document.querySelector('#ended .link').scrollIntoView({block: 'center'})")
        page.click("#ended .link")
        page.wait("document.querySelector('#trace-picture svg') !== null")
        lanes = "[...document.querySelectorAll('.lane-name')].map((e) => e.textContent)"
        assert page.run(lanes) == ["gateway", "router", "transfer", "decode"]
        assert "decode at d:1" in page.text("#trace-facts")
        rows = "[...document.querySelectorAll('#trace-phases tbody tr')].map((e) => e.innerText)"
        phases = [row.split("\t") for row in page.run(rows)]
        took = {phase.strip(): (lane, time) for phase, lane, _, time in phases}
        assert took["queue"] == ("decode", "10 ms")
        assert took["compute the prompt"] == ("decode", "20 ms")
        assert took["keys and values"] == ("transfer", "3 ms")
        box = page.run("""(({ width, height }) => [width, height])(
          document.querySelector("#trace-picture svg").getBoundingClientRect())""")
        assert box[0] > 0.7 * min(size[0], 52 * 16)
        assert box[1] > 150
        assert page.violations() == [], (scheme, size)
        page.press("Escape")
        page.wait("!document.querySelector('#trace-dialog').open")


def test_a_late_trace_does_not_replace_the_one_that_is_shown(shown: Shown) -> None:
    """A phase of a newer gateway is left out."""
    script = """(async () => {
      const { showTrace } = await import("/web/trace.js");
      const phases = ["queue", "future"].map((name) => ({ name, start_ms: 0, duration_ms: 1 }));
      const trace = { phases, attempts: [], total_ms: 2, time_to_first_token_ms: null };
      const original = window.fetch;
      let release;
      const held = new Promise((resolve) => (release = resolve));
      window.fetch = async (url, ...rest) => {
        const id = /v1\\/traces\\/(.*)/.exec(url)?.[1];
        if (!id) return original(url, ...rest);
        if (id === "slow") await held;
        return Response.json({ ...trace, model: id });
      };
      const slow = showTrace("slow");
      await showTrace("fast");
      release();
      await slow;
      window.fetch = original;
      document.querySelector("#trace-dialog").close();
      const rows = document.querySelectorAll("#trace-phases tbody tr").length;
      return [document.querySelector("#trace-facts").textContent.split(" · ")[0], rows];
    })()"""
    assert shown.page.run(script) == ["fast", 1]


def test_axe_finds_nothing_serious(shown: Shown) -> None:
    page = shown.page
    ask(shown.url, "hello")
    page.wait("document.querySelectorAll('#ended tbody tr').length === 1")
    for scheme, size in product(("light", "dark"), (DESKTOP, PHONE)):
        page.prefer(scheme)
        page.resize(*size)
        page.wait(f"document.documentElement.dataset.theme === '{scheme}'")
        assert page.violations() == [], (scheme, size)
        assert page.run("document.documentElement.scrollWidth") == size[0]


def test_a_lost_router_is_reported(shown: Shown) -> None:
    view, shown.router.view = shown.router.view, None
    shown.page.wait("document.querySelector('#notice').innerText.includes('no router')")
    assert shown.page.run("document.querySelectorAll('.worker').length") == 2
    shown.router.view = view
    shown.page.wait("document.querySelector('#notice').hidden")


def test_the_page_asks_for_a_key(browser: Browser) -> None:
    page = browser
    with served_gateway(ChatModel, api_keys=("right",)) as url:
        page.open(f"{url}/fleet")
        page.wait("document.querySelector('#key-dialog').open")
        page.fill("#api-key", "right")
        page.press("Enter")
        page.wait("document.querySelectorAll('.worker').length === 1")
