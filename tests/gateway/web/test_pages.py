"""The files of the pages, and the contents of /fleet/state for each key."""

import asyncio
import re
from pathlib import Path

import pytest
from fakes.router import Event, FakeRouter, placed, saying, tokens

from pdserve.gateway.metrics import MAX_SHOWN
from pdserve.gateway.web import pages
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio

ASSETS = Path(pages.__file__).parent / "assets"
URL = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEYS = ("one", "two")
POLICY = (  # repeated here, so that a change of the policy must change the test
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_pages_need_no_key_and_their_api_does(make_http):
    client = make_http(saying("x"), keys=KEYS, pages=True, root_path="/llm")
    for path in ("/", "/llm", "/fleet", "/llm/fleet/", "/web/chat.js", "/llm/web/purify.es.js"):
        answer = await client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == POLICY
        assert '<base href="/llm/">' in answer.text or "web" in path
    for path in ("/fleet/state", "/web/chat.html", "/web/other.js", "/web/..%2fpages.py"):
        assert (await client.get(path)).status_code == 401
    for path in ("/web/chat.html", "/web/other.js", "/web/..%2fpages.py", "/web/chat.js/x"):
        assert (await client.get(path, headers=shown("one"))).status_code == 404


async def test_an_unchanged_file_is_not_sent_again(make_http):
    client = make_http(saying("x"), pages=True)
    first = await client.get("/web/chat.js")
    again = await client.get("/web/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert not again.content
    plain = await client.get("/web/chat.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == first.text == (ASSETS / "chat.js").read_text()


async def test_pages_reference_only_existing_files(make_http):
    client = make_http(saying("x"), pages=True)
    named = {name for page in ASSETS.glob("*.html") for name in links(page)}
    named |= {name for script in ASSETS.glob("*.js") for name in imports(script)}
    assert {"chat.js", "fleet.js", "icons.svg"} <= named
    libraries = {"marked.esm.js", "purify.es.js", "highlight.min.js", "katex.min.js"}
    assert libraries == {path.stem for path in (ASSETS / "vendored").glob("*.gz")} <= named
    for name in named:
        assert (await client.get(f"/web/{name}")).status_code == 200, name
    icons = {path.name: set(re.findall(r"icons\.svg#(\w+)", path.read_text())) for path in
             ASSETS.glob("*.html")}  # fmt: skip
    there = set(re.findall(r'symbol id="(\w+)"', (ASSETS / "icons.svg").read_text()))
    assert set().union(*icons.values()) <= there


def links(page: Path) -> list[str]:
    text = page.read_text()
    assert "<script>" not in text
    assert not re.search(r"\son\w+=|style=|https?:", text)
    return re.findall(r'(?:src|href)="web/([^"#]+)', text)


def imports(script: Path) -> list[str]:
    return re.findall(r'(?:from |import\()"\./([^"]+)"', script.read_text())


async def test_a_root_path_that_hides_a_page_is_refused(make_app):
    for path in ("/fleet", "/web"):
        with pytest.raises(ValueError, match="--root-path"):
            make_app(FakeRouter(saying("x")), pages=True, root_path=path)


async def test_a_key_sees_only_its_requests_and_the_whole_fleet(make_http):
    client = make_http(saying("hello"), keys=KEYS, pages=True)
    headers = {**shown("one"), "x-request-id": "mine"}
    assert (await client.post(URL, json=BODY, headers=headers)).status_code == 200
    mine = (await client.get("/fleet/state", headers=shown("one"))).json()
    theirs = (await client.get("/fleet/state", headers=shown("two"))).json()
    assert mine["workers"] == theirs["workers"]
    (worker,) = mine["workers"]
    assert worker["blocks"] == {"total": 10, "free": 4, "used": 3, "cached": 2, "reserved": 1}
    assert theirs["ended"] == theirs["open"] == []
    (ended,) = mine["ended"]
    assert (ended["id"], ended["phase"], ended["finish"]) == ("mine", "ended", "stop")
    assert (ended["queue_s"], ended["prefill_s"], ended["transfer_s"]) == (0.01, 0.02, 0.003)
    assert ended["decode_at"] == "d:1"
    assert 0 <= ended["prepared_s"] <= ended["first_token_s"] <= ended["elapsed_s"]
    assert ended["ended_s"] >= 0


async def test_the_phases_of_an_open_request_are_shown(make_http):
    go = asyncio.Event()
    waiting = asyncio.Event()

    async def play(router: FakeRouter, start: pb.Start):
        for event in (placed(start), tokens(start, router.encode("he"), 0), None):
            waiting.set()
            await go.wait()
            go.clear()
            if isinstance(event, Event):
                yield event

    client = make_http(play, pages=True)
    request = asyncio.create_task(client.post(URL, json=BODY))
    seen = []
    for _ in range(3):
        await waiting.wait()
        waiting.clear()
        state = (await client.get("/fleet/state")).json()
        assert state["num_open"] == len(state["open"]) == 1
        seen.append(state["open"][0]["phase"])
        go.set()
    assert seen == ["placing", "prefill", "decode"]
    await request
    state = (await client.get("/fleet/state")).json()
    assert state["num_open"] == 0
    assert state["ended"][0]["finish"] == "INTERNAL"


async def test_listed_requests_are_bounded(make_http):
    client = make_http(saying("x"), pages=True)
    for number in range(MAX_SHOWN + 3):
        body = {"model": "none", "prompt": "x"}
        headers = {"x-request-id": f"r{number}"}
        await client.post("/v1/completions", json=body, headers=headers)
    ended = (await client.get("/fleet/state")).json()["ended"]
    assert [one["id"] for one in ended] == [f"r{n}" for n in range(MAX_SHOWN + 2, 2, -1)]


async def test_many_viewers_cause_one_request_to_the_router(make_http, monkeypatch):
    monkeypatch.setattr(pages, "FRESH_S", 3600.0)
    router = FakeRouter(saying("x"))
    requests = []
    fleet_of = router.fleet

    async def counted():
        requests.append(1)
        return await fleet_of()

    router.fleet = counted  # type: ignore[method-assign]
    client = make_http(router, pages=True)
    await asyncio.gather(*(client.get("/fleet/state") for _ in range(20)))
    assert len(requests) == 1
    monkeypatch.setattr(pages, "FRESH_S", -1.0)
    await client.get("/fleet/state")
    assert len(requests) == 2


async def test_without_a_fleet_the_requests_are_still_listed(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router, pages=True)
    await client.post(URL, json=BODY)
    router.view = None
    state = (await client.get("/fleet/state")).json()
    assert (state["workers"], state["counters"]) == ([], None)
    assert state["error"] == "no router can be reached"
    assert len(state["ended"]) == 1
