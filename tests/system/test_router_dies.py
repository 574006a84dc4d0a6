"""The only router is killed during eight streams: their requests are adopted and none is lost."""

import os
import signal
import threading
from typing import Any

import openai
from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.streams import LONG, WORDS, Stream

OPTIONS = ("--kv-tokens", "16384", "--chunk-size", "64", "--kv-transport", "tcp")


def streams() -> list[Stream]:
    """Return greedy and sampled streams: one with two choices and log-probabilities, one with a
    long prompt that a prefill worker computes."""
    each: list[dict[str, Any]] = [{"temperature": 0.0} for _ in range(3)]
    each += [{"temperature": 1.0, "seed": seed} for seed in range(3)]
    each += [{"temperature": 1.0, "seed": 9, "n": 2, "logprobs": 2}]
    short = [
        Stream({"prompt": f"Number {n}: {WORDS * (1 + n)}", "max_tokens": 160, **options})
        for n, options in enumerate(each)
    ]
    return [*short, Stream({"prompt": LONG, "max_tokens": 40, "temperature": 0.0})]


def run_all(fleet: Fleet, request: list[Stream], kill: bool) -> None:
    """Run the streams concurrently. With `kill`, kill the router during the transfer of the long
    prompt's KV."""
    api = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)
    model = api.models.list().data[0].id
    threads = [threading.Thread(target=s.run, args=(api, model)) for s in request]
    for thread in threads[:-1]:
        thread.start()
    wait_until(lambda: all(s.num_chunks > 3 for s in request[:-1]), "streams under way")
    threads[-1].start()
    if kill:
        sent = fleet.metric("pdserve_transfer_bytes_total", transport="tcp")
        wait_until(
            lambda: fleet.metric("pdserve_transfer_bytes_total", transport="tcp") > sent,
            "a first frame",
        )
        (victim,) = fleet.pids("router")
        os.kill(victim, signal.SIGKILL)
        assert not request[-1].num_chunks, "the hand-off was over before the kill"
        assert not any(s.ends for s in request), "a stream was over before the kill"
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def loads(fleet: Fleet) -> dict[str, Any]:
    """Return the workers' loads by role, as reported after the end of the last stream."""

    def both() -> dict[str, Any]:
        found = {w.hello.data_address != "": w.load for w in fleet.fleet_view().workers}
        is_idle = not any(load.running for load in found.values())
        return found if len(found) == 2 and is_idle else {}

    found = wait_until(both, "both workers to be idle")
    return {"decode": found[True], "prefill": found[False]}


def test_a_killed_router_costs_no_stream_a_token() -> None:
    request, whole = streams(), streams()
    with Fleet("--prefill", "1", "--decode", "1", *OPTIONS) as fleet:
        run_all(fleet, request, kill=True)
        assert not any(s.error for s in request), [s.error for s in request]
        struck = loads(fleet)
        decode = struck["decode"]
        assert decode.adopted == len(request)
        assert (decode.parked, decode.park_expired, decode.park_evicted) == (0, 0, 0)
        computed = {role: load.prompt_tokens for role, load in struck.items()}
        # Prefill computes the long prompt and those parts of the short ones that would delay
        # decode.
        assert computed["prefill"] >= request[-1].usage.prompt_tokens - 1
        assert computed["decode"] >= len(request)
        assert sum(computed.values()) == sum(s.usage.prompt_tokens for s in request), "each once"
        wait_until(fleet.all_blocks_back, "blocks back")

        run_all(fleet, whole, kill=False)
        assert not any(s.error for s in whole), [s.error for s in whole]
        for calm, after in zip(whole, request, strict=True):
            assert after.answer == calm.answer
