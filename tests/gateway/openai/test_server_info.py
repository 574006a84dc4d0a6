"""/props, /slots, /load, /tokenizer_info, /apply-template, and the routes without /v1."""

import asyncio
from typing import Any

import pytest
from fakes.router import FakeRouter, finished, placed, saying, tokens
from fakes.tool_model import ToolModel
from oracles.http_errors import CHAT, HI, PLAIN
from systems.eventually import eventually
from systems.served_gateway import every_kind

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.metrics import GatewayProcesses
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
REQUEST = {"model": "tiny", "messages": HI}
KEYS = ("one", "other")


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


class Held(FakeRouter):
    """Play one token, and the rest once released."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        super().__init__(self._say)

    async def _say(self, router: FakeRouter, start: pb.Start) -> Any:
        yield placed(start)
        (token,) = router.encode("a")
        yield tokens(start, [token], 0)
        await self.go.wait()
        yield tokens(start, [router.eos], 1, finish=pb.STOP)
        yield finished(start)


async def test_props_and_tokenizer_info(make_http):
    router = FakeRouter(saying("x"))
    card = router.cards[0]
    http = make_http(router, limits=AdmissionLimits(48, 32))
    props = (await http.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == card.context_len
    assert (props["total_slots"], props["model_alias"]) == (48, "tiny")
    assert props["chat_template"].encode() == router.blobs[card.template_digest]
    info = (await http.get("/tokenizer_info", params={"model": "tiny"})).json()
    assert (info["vocab_size"], info["model_max_length"]) == (card.vocab_size, card.context_len)
    eos = router.words.id_to_token(card.eos_ids[0])
    assert eos == info["eos_token"] == props["eos_token"]
    bos = router.words.id_to_token(card.bos_id) if card.has_bos else ""
    assert info["bos_token"] == bos
    for path in ("/props", "/tokenizer_info"):
        assert (await http.get(path, params={"model": "none"})).status_code == 404
    several = make_http(every_kind())
    assert (await several.get("/props")).status_code == 400, (
        "the model must be named if there are several"
    )
    assert (await several.get("/props", params={"model": "tiny"})).status_code == 200


async def test_slots_list_the_requests_of_the_key_and_load_counts_all(make_http):
    router = Held()
    limits = AdmissionLimits(2, 2)
    http = make_http(router, keys=KEYS, limits=limits)
    requests = [
        asyncio.create_task(http.post(CHAT, json=REQUEST, headers=key(name))) for name in KEYS
    ]
    await eventually(lambda: len(router.starts) == 2)

    async def seen(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await http.get("/slots", headers=key(name))).json()
        return found

    await eventually(lambda: limits.waiting == 0)
    shown = [(await seen(name)) for name in KEYS]
    assert [len(slots) for slots in shown] == [1, 1]
    ids = {slots[0]["request_id"] for slots in shown}
    assert len(ids) == 2
    slot = shown[0][0]
    assert (slot["id"], slot["model"], slot["is_processing"]) == (0, "tiny", True)
    assert slot["n_ctx"] == router.cards[0].context_len
    assert slot["next_token"] == [{"n_decoded": 1}]
    assert slot["n_prompt_tokens"] == len(router.starts[0].prompt_ids)
    load = await http.get("/load", headers=key("one"))
    assert load.json() == {"server_load": 2}
    full = await http.get("/slots", params={"fail_on_no_slot": 1}, headers=key("one"))
    assert full.status_code == 503
    router.go.set()
    assert {reply.status_code for reply in await asyncio.gather(*requests)} == {200}
    assert await seen("one") == []
    assert (await http.get("/load", headers=key("one"))).json() == {"server_load": 0}
    free = await http.get("/slots", params={"fail_on_no_slot": 1}, headers=key("one"))
    assert free.status_code == 200
    for path in ("/slots", "/load", "/props", "/tokenizer_info", "/models"):
        assert (await http.get(path)).status_code == 401
    assert (await http.post("/apply-template", json=REQUEST)).status_code == 401


async def test_slots_include_other_processes_of_the_port(make_http, tmp_path):
    """List the open requests of two processes for one key."""
    both = [GatewayProcesses(tmp_path, index, 2) for index in range(2)]
    routers = [Held(), Held()]
    clients = []
    for processes, router in zip(both, routers, strict=True):

        def arrange(service: Any, processes: GatewayProcesses = processes) -> None:
            service.processes = processes

        clients.append(make_http(router, arrange=arrange))
        await processes.start()
    requests = [asyncio.create_task(client.post(CHAT, json=REQUEST)) for client in clients]
    await eventually(lambda: all(router.starts for router in routers))
    for client in clients:
        assert len((await client.get("/slots")).json()) == 2
        assert (await client.get("/load")).json() == {"server_load": 2}
    for router in routers:
        router.go.set()
    await asyncio.gather(*requests, *(processes.close() for processes in both))


async def test_a_template_is_applied_without_running_a_model(make_http):
    router = ToolModel("x")
    http = make_http(router)
    tool = {"type": "function", "function": {"name": "weather", "description": "of a place"}}
    body = {**REQUEST, "tools": [tool]}
    prompt = (await http.post("/apply-template", json=body)).json()["prompt"]
    assert router.starts == []
    await http.post(CHAT, json=body)
    assert prompt == router.prompt(0)
    assert "weather" in prompt
    turns = [*HI, {"role": "assistant", "content": "hel"}]
    body = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    prompt = (await http.post("/apply-template", json=body)).json()["prompt"]
    assert prompt.endswith("hel")
    wrong = await http.post("/apply-template", json={"messages": []})
    assert wrong.json()["error"]["param"] == "messages"


async def test_routes_without_v1_are_equivalent(make_http, subtests):
    http = make_http(every_kind())
    for path, body in (
        (CHAT, REQUEST),
        (f"{CHAT}/batch", {**REQUEST, "messages": [HI]}),
        (PLAIN, {"model": "tiny", "prompt": "hi"}),
        ("/v1/responses", {"model": "tiny", "input": "hi"}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": "hi"}),
        ("/v1/embeddings", {"model": "embedder", "input": "hi"}),
    ):
        with subtests.test(path):
            answers = [await http.post(p, json=body) for p in (path, path.removeprefix("/v1"))]
            assert [reply.status_code for reply in answers] == [200, 200]
            one, other = (reply.json() for reply in answers)
            assert one.keys() == other.keys()
            assert one.get("usage") == other.get("usage")
            wrong = await http.post(path.removeprefix("/v1"), json={"model": 5})
            assert wrong.json()["error"]["param"] == "model"
    assert (await http.get("/models")).json() == (await http.get("/v1/models")).json()
    assert (await http.get("/models/tiny")).json() == (await http.get("/v1/models/tiny")).json()
    assert (await http.get("/responses/none")).status_code == 404


async def test_a_batch_of_chats(make_http):
    router = FakeRouter(saying("hello world"))
    http = make_http(router)
    said = [[{"role": "user", "content": "x" * n}] for n in range(1, 41)]
    body = {**REQUEST, "messages": said, "max_tokens": 3, "return_token_ids": True}
    answer = (await http.post(f"{CHAT}/batch", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(40))
    single = [
        (await http.post(CHAT, json={**body, "messages": messages})).json() for messages in said[:3]
    ]
    for choice, alone in zip(answer["choices"], single, strict=False):
        assert choice["message"] == alone["choices"][0]["message"]
        assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
        assert choice["token_ids"] == alone["choices"][0]["token_ids"]
    starts = router.starts[:40]
    assert len({start.request for start in starts}) == 40
    assert answer["usage"]["prompt_tokens"] == sum(len(start.prompt_ids) for start in starts)
    assert answer["usage"]["completion_tokens"] == 3 * 40
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert "-" not in answer["id"].removeprefix("chatcmpl-")


async def test_a_batch_logs_dropped_tools_once(make_http, caplog):
    router = ToolModel("x")
    function = {"type": "function", "function": {"name": "f"}}
    body = {**REQUEST, "messages": [HI, HI, HI], "tools": [{"type": "web_search"}, function]}
    with caplog.at_level("DEBUG"):
        reply = await make_http(router).post(f"{CHAT}/batch", json=body)
    assert reply.status_code == 200, reply.json()
    assert [router.prompt(number)[:8] for number in range(3)] == ["tools: f"] * 3
    assert caplog.text.count("'web_search'") == 1
    wrong = await make_http(router).post(f"{CHAT}/batch", json={**body, "tool_choice": "some"})
    assert wrong.status_code == 400


async def test_a_batch_fails_as_a_whole(make_http):
    async def play(router: FakeRouter, start: pb.Start) -> Any:
        yield placed(start)
        if len(router.starts) == 2:
            raise RuntimeError("broken")
        await asyncio.Event().wait()

    router = FakeRouter(play)
    http = make_http(router)
    reply = await http.post(f"{CHAT}/batch", json={**REQUEST, "messages": [HI, HI, HI]})
    assert reply.status_code == 500
    assert len(router.left) == len(router.starts), "the other requests must be cancelled"
    for name, more in (
        ("stream", {"stream": True}),
        ("n", {"n": 2}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("messages[0]", {"messages": HI}),
        ("messages[1]", {"messages": [HI, []]}),
        ("messages", {"messages": [HI] * 129}),
    ):
        reply = await http.post(f"{CHAT}/batch", json={**REQUEST, "messages": [HI], **more})
        assert reply.status_code == 400, (name, reply.text)
        assert reply.json()["error"]["param"] == name


async def test_log_probabilities_of_a_batch_are_bounded(make_http, monkeypatch):
    monkeypatch.setattr("pdserve.gateway.sampling.MAX_LOGPROBS", 40)
    router = FakeRouter(saying("hello world"))
    http = make_http(router)
    body = {**REQUEST, "messages": [HI] * 9, "logprobs": True, "max_tokens": 3}
    few = await http.post(f"{CHAT}/batch", json=body)
    assert [len(c["logprobs"]["content"]) for c in few.json()["choices"]] == [3] * 9
    reply = await http.post(f"{CHAT}/batch", json={**body, "messages": [HI] * 20})
    assert reply.status_code == 400
    assert "fewer conversations" in reply.json()["error"]["message"]
    assert len(router.starts) < 9 + 20, "the batch must end at the limit"
