"""Short and unusual requests give the same answer, field by field, with and without remote prefill.

The model is tiny and random, so prompts of one or two blocks suffice and a whole system starts
quickly.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from builders.tiny_models import write_tiny
from systems.eventually import LIMIT_S, wait_until
from systems.fleet import Fleet

from pdserve.protos import common_pb2, fleet_pb2, router_pb2, worker_pb2

pytestmark = pytest.mark.extended

BLOCK = 32
EOS = 258
OPTIONS = ("--kv-tokens", "8192", "--block-size", str(BLOCK), "--weights", "float32")


def ids(length: int, seed: int = 0) -> list[int]:
    return [(17 * i + 31 * seed + 5) % 256 for i in range(length)]


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 7)
ENDS_AT_ONCE = (1, BLOCK, BLOCK + 1, 5 * BLOCK + 7)
COMPLETIONS: dict[str, dict[str, Any]] = {
    **{f"{n} tokens": {"prompt": ids(n, n), **GREEDY} for n in LENGTHS},
    **{f"{n} tokens again": {"prompt": ids(n, n), **GREEDY} for n in LENGTHS},
    **{
        f"one token after {n}": {"prompt": ids(n, 100 + n), **GREEDY, "max_tokens": 1}
        for n in ENDS_AT_ONCE
    },
    **{
        f"eos first after {n}": {
            "prompt": ids(n, 200 + n), "temperature": 0, "logit_bias": {str(EOS): 100}
        }
        for n in ENDS_AT_ONCE
    },
    "empty text": {"prompt": "", **GREEDY},
    "text": {"prompt": "Grüße, 世界 🙂! " * 5, **GREEDY},
    "logprobs": {"prompt": ids(70, 1), **GREEDY, "logprobs": 3},
    "choices": {"prompt": ids(70, 2), "n": 3, "temperature": 1, "seed": 7, "max_tokens": 9},
    "best": {
        "prompt": ids(70, 3), "n": 2, "best_of": 4, "temperature": 1, "seed": 7, "max_tokens": 5
    },
    "echo": {"prompt": ids(70, 4), **GREEDY, "echo": True},
    "echo and logprobs": {"prompt": ids(70, 5), **GREEDY, "echo": True, "logprobs": 2},
    "several prompts": {"prompt": [ids(70, 6), ids(3, 16), ids(64, 26)], **GREEDY, "n": 2},
    "penalties": {
        "prompt": ids(90, 7), "temperature": 0.8, "seed": 3, "max_tokens": 12, "top_k": 40,
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    },
    "stop id": {"prompt": ids(70, 8), "max_tokens": 30, "seed": 1, "stop_token_ids": ids(128)},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"prompt": []}, "prompt"),
    "nothing of a list": ({"prompt": [ids(3), []]}, "prompt"),
    "empty text without bos": ({"prompt": "", "add_special_tokens": False}, "prompt"),
    "unknown id": ({"prompt": [259]}, "prompt"),
    "whole context": ({"prompt": ids(512)}, "prompt"),
    "n": ({"prompt": "x", "n": 129}, "n"),
    "bias": ({"prompt": "x", "logit_bias": {"259": 1}}, "logit_bias"),
}


def answers_of(fleet: Fleet) -> dict[str, Any]:
    """Return all completions, requested one after the other, without the fields that differ between
    runs."""
    answers = {}
    with httpx.Client(base_url=fleet.url, timeout=30) as http:
        for name, body in COMPLETIONS.items():
            reply = http.post("/v1/completions", json={"model": "tiny", **body})
            assert reply.status_code == 200, f"{name}: {reply.text}"
            answer = reply.json()
            del answer["id"], answer["created"]
            answers[name] = answer
        for name, (body, param) in REFUSED.items():
            reply = http.post("/v1/completions", json={"model": "tiny", **body})
            assert reply.status_code == 400, f"{name}: {reply.text}"
            assert reply.json()["error"]["param"].split("[")[0] == param, name
    wait_until(fleet.all_blocks_back, "blocks back")
    return answers


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf by its path."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        return {path: value}
    return {
        path: len(value),
        **{k: v for key, one in pairs for k, v in flat(one, f"{path}/{key}").items()},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="module")
def local(model: Path) -> dict[str, Any]:
    with Fleet("--model", str(model), "--prefill", "0", *OPTIONS) as fleet:
        answers = answers_of(fleet)
        assert fleet.prefills("remote") == 0
    assert fleet.exit_code == 0
    return answers


def test_one_token(local: dict[str, Any]) -> None:
    for length in ENDS_AT_ONCE:
        answer = local[f"one token after {length}"]
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"


def test_the_first_token_ends_the_answer(local: dict[str, Any]) -> None:
    for length in ENDS_AT_ONCE:
        answer = local[f"eos first after {length}"]
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["text"] == ""


def test_full_blocks_of_a_repeated_prompt_are_cached(local: dict[str, Any]) -> None:
    for length in LENGTHS:
        usage = local[f"{length} tokens again"]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == min(length // BLOCK * BLOCK, length - 1)  # the last token is computed
        assert local[f"{length} tokens"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_empty_prompt_becomes_a_bos_token(local: dict[str, Any]) -> None:
    assert local["empty text"]["usage"]["prompt_tokens"] == 1
    assert local["empty text"]["usage"]["completion_tokens"] == 6


WRONG = [(("authorization", f"Bearer {secret}"),) for secret in ("wrong", "")]


def internal_methods() -> Iterator[str]:
    """Yield every method that only the fleet's processes may call."""
    for file in (common_pb2, fleet_pb2, router_pb2, worker_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)
    yield "/grpc.health.v1.Health/Watch"


def strangers_get_nothing(fleet: Fleet) -> None:
    """Check that an unauthenticated client is refused on every gRPC port and on decode's data
    port."""
    workers = [worker.hello for worker in fleet.fleet_view().workers]
    ports = {"gateway": fleet.grpc, "router": fleet.router}
    ports |= {fleet_pb2.Role.Name(worker.role): worker.address for worker in workers}
    assert len(ports) == 4
    for role, address in ports.items():
        with grpc.insecure_channel(address) as channel:
            for method in internal_methods():
                for metadata in ((), *WRONG):
                    with pytest.raises(grpc.RpcError) as refused:
                        next(channel.stream_stream(method)(iter([b""]), metadata=metadata))
                    code = refused.value.code()  # type: ignore[attr-defined]
                    assert code is grpc.StatusCode.UNAUTHENTICATED, f"{role} {method}"
    (data,) = [worker.data_address for worker in workers if worker.data_address]
    host, port = data.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(b"\x05hello" * 1000)
        with suppress(ConnectionResetError):
            stranger.recv(1 << 16)  # at most a hello
            assert stranger.recv(1 << 16) == b"", "closed"


def nothing_is_left(fleet: Fleet, family: list[psutil.Process], folder: Path) -> None:
    assert fleet.exit_code == 0, fleet.final_log
    assert "leaked" not in fleet.final_log  # the kernels' bindings would report leaks
    gone, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive
    assert len(gone) == len(family)
    assert [p for p in folder.iterdir() if "pdserve" in p.name] == []
    assert not [name for name in os.listdir("/dev/shm") if "pdserve" in name]
    host, port = fleet.url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_remote_answers_are_the_same_field_by_field(
    model: Path, local: dict[str, Any], transport: str, tmp_path: Path
) -> None:
    """Also checks that nothing remains when the system has stopped: no process, socket or shared
    memory."""
    options = ("--remote-prefill", "always", "--kv-transport", transport, *OPTIONS)
    env = {"TMPDIR": str(tmp_path)}
    with Fleet("--model", str(model), *options, env=env, drain_s=30) as fleet:
        family = psutil.Process(fleet.process.pid).children(recursive=True)
        assert len(family) >= 4
        if transport == "tcp":
            strangers_get_nothing(fleet)
        answers = answers_of(fleet)
        remote = fleet.prefills("remote")
        wait_until(
            lambda: fleet.metric("pdserve_transfer_bytes_total", transport=transport) > 0,
            "the workers' next load report",
        )
        wait_until(lambda: f"prefill_at={transport}" in fleet.log(), "the gateway's line")
    nothing_is_left(fleet, family, tmp_path)
    assert remote >= len(LENGTHS) - 1 + 2 * (len(ENDS_AT_ONCE) - 1)
    assert list(answers) == list(local)
    for name, answer in answers.items():
        assert flat(answer) == pytest.approx(flat(local[name]), abs=1e-4), name
