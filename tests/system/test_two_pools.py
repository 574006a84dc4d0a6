"""New weights arrive as a second pool under load. After its signal the old pool takes no more
requests, its streams end on it, and no answer mixes both models (docs/upgrades.md)."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from builders.tiny_models import write_tiny
from systems.eventually import LIMIT_S, wait_until
from systems.replaceable import Replaceable, ReplaceableSystem
from systems.streams import Stream

from pdserve.services.common.options import ECHO_S

pytestmark = pytest.mark.extended

NAME = "tiny"
STREAMS = 20
LONG = "a prompt that is long enough to be computed by a worker of its own. " * 2


def asks() -> list[dict[str, Any]]:
    """Return requests with alternating short and long prompts whose answers take a while."""
    return [
        {"prompt": f"{n}: {LONG if n % 2 else ''}", "max_tokens": 250, "temperature": 0.0}
        for n in range(STREAMS)
    ]


class Pool:
    """A prefill and a decode worker with the weights of one model."""

    def __init__(self, system: ReplaceableSystem, model: Path) -> None:
        words = ("--model", str(model), "--served-name", NAME)
        self._system = system
        self.prefill = system.worker("prefill", *words)
        self.decode = system.worker("decode", *words)

    def load(self) -> Any:
        (found,) = [
            w.load for w in self._system.view().workers if w.hello.address == self.decode.address
        ]
        return found

    def retire(self) -> list[int]:
        """Send SIGTERM to both workers at once, as a scale to 0 does, and return the exit codes."""
        codes: dict[Replaceable, int] = {}

        def one(process: Replaceable) -> None:
            codes[process] = self._system.retire(process)

        threads = [threading.Thread(target=one, args=(p,)) for p in (self.prefill, self.decode)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        return list(codes.values())


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, rings: Path) -> Iterator[ReplaceableSystem]:
    own = ("--kv-tokens", "65536", "--chunk-size", "64", "--kv-transport", "tcp")
    folder = tmp_path_factory.mktemp("pools")
    with ReplaceableSystem(folder, *own, "--weights", "float32") as system:
        system.router("--remote-prefill", "auto", "--remote-prefill-threshold", "64")
        yield system


@pytest.fixture(scope="module")
def old(system: ReplaceableSystem, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(system, tiny_model(tmp_path_factory.mktemp("old") / "old", 5))


@pytest.fixture(scope="module")
def api(system: ReplaceableSystem, old: Pool) -> Iterator[openai.OpenAI]:
    system.gateway()
    with openai.OpenAI(
        base_url=f"{system.gateways[0].url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as client:
        yield client


def tiny_model(folder: Path, seed: int) -> Path:
    """Write a model whose seed affects only the weights; tokenizer and template are always the
    same."""
    return write_tiny(folder, "llama", seed, max_position_embeddings=2048)


def run(api: openai.OpenAI) -> tuple[list[Stream], list[threading.Thread]]:
    streams = [Stream(options) for options in asks()]
    threads = [threading.Thread(target=s.run, args=(api, NAME)) for s in streams]
    for thread in threads:
        thread.start()
    return streams, threads


def answers(streams: list[Stream], threads: list[threading.Thread]) -> list[str]:
    """Wait for all streams, check that none was cut, and return their texts."""
    for thread in threads:
        thread.join(LIMIT_S)
    assert [s.error for s in streams if s.error] == []
    assert all(s.ends == {0: "length"} for s in streams)
    return [s.text[0] for s in streams]


def test_a_change_of_weights_under_load(
    system: ReplaceableSystem, old: Pool, api: openai.OpenAI, tmp_path: Path
) -> None:
    of_old = answers(*run(api))
    assert system.view().prefill_remote, "no long prompt was prefilled remotely"
    new = Pool(system, tiny_model(tmp_path / "new", 6))

    streams, threads = run(api)  # both pools accept requests
    wait_until(lambda: all(s.num_chunks > 3 for s in streams), "streams")
    assert old.load().running, "no request runs on the old pool"
    assert new.load().running, "no request runs on the new pool"
    codes: list[int] = []
    retiring = threading.Thread(target=lambda: codes.extend(old.retire()))
    retiring.start()
    wait_until(lambda: any(w.state == "draining" for w in system.view().workers), "draining")
    late, late_threads = run(api)  # the old pool accepts none of these
    both = answers(streams, threads)
    of_new = answers(late, late_threads)
    retiring.join(LIMIT_S)
    assert codes == [0, 0], "a drain ended at its time limit instead of with its last stream"

    assert all(one != other for one, other in zip(of_old, of_new, strict=True))
    found = [text in (a, b) for text, a, b in zip(both, of_old, of_new, strict=True)]
    assert all(found), "an answer mixes tokens of both models"
    assert set(both) & set(of_old)
    assert set(both) & set(of_new)
    assert [w.hello.address for w in system.view().workers if w.hello.data_address] == [
        new.decode.address
    ]


def test_a_second_signal_ends_a_drain_at_once(
    system: ReplaceableSystem, api: openai.OpenAI
) -> None:
    (decode,) = [w for w in system.workers if w.role == "decode"]
    streams, _ = run(api)
    wait_until(lambda: all(s.num_chunks > 3 for s in streams), "streams")
    decode.popen.send_signal(signal.SIGTERM)
    time.sleep(1.5 * ECHO_S)  # an earlier signal counts as the same stop
    assert decode.popen.poll() is None, "it drains"
    decode.popen.send_signal(signal.SIGTERM)
    assert decode.popen.wait(LIMIT_S) == 128 + signal.SIGTERM
