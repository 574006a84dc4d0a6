"""Tokenizer workers: files of a model are processed under limits and without effect on others."""

import asyncio
import errno
import gc
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from builders import hostile_templates
from builders.hostile_templates import ENDLESS, HUGE
from builders.tiny_spm import spm_metadata, spm_tokenizer
from systems.eventually import LIMIT_S, eventually
from systems.tokenizer_pools import LIMITS, Pool, fork_servers, workers

from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.services.common.errors import ServiceError
from pdserve.text import TemplateInput, TextError, TooLong, UnsupportedTokenizer
from pdserve.text.templates import ChatTemplate
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.workers import LoadedTokenizer
from pdserve.text.workers.messages import FORK, MessageReader, WorkerMessage, pack

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi <s> you"}]
PLAIN = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


def files(tokenizer: bytes, template: str = PLAIN) -> dict[str, bytes]:
    return {"tokenizer": tokenizer, "template": template.encode(), "generation": b""}


@pytest.fixture
async def make_pool(anyio_backend: str) -> AsyncIterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(workers: int = 2, wait_s: float = LIMIT_S, **limits: Any) -> Pool:
        pools.append(Pool(replace(LIMITS, **limits), workers, wait_s))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
    assert not fork_servers()


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool()


async def loaded(pool: Pool, template: str = PLAIN) -> LoadedTokenizer:
    data, model_info = spm_file()
    return await pool.load(model_info, files(data, template))


def spm_file() -> tuple[bytes, TextModelInfo]:
    data = tokenizer_json(spm_metadata())
    size = len(json.loads(data)["model"]["vocab"])
    return data, TextModelInfo(size, eos_ids=(2,), bos_id=1, adds_bos=True)


async def chat(text: LoadedTokenizer, owner: bytes = b"", messages: Any = HI) -> list[int]:
    return await text.workers.chat_ids(owner, TemplateInput(messages), max_len=1 << 20)


async def in_time(text: LoadedTokenizer) -> list[int]:
    """The prompt's ids, or an empty list on a timeout, which a busy machine can cause."""
    with suppress(ServiceError):
        return await chat(text)
    return []


def test_the_process_exits_quietly_when_the_gateway_is_gone() -> None:
    """Exit also if messages on the way are never read."""
    data, model_info = spm_file()
    near, far = socket.socketpair()
    with far:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pdserve.text.workers.fork_server"),
                *(str(far.fileno()), json.dumps(asdict(LIMITS)), "text"),
            ],
            pass_fds=[far.fileno()],
            stderr=subprocess.PIPE,
        )
    model = files(data)
    near.settimeout(LIMIT_S)
    near.sendall(
        pack(
            WorkerMessage(
                {"model_info": asdict(model_info), "files": list(model)}, [*model.values()]
            )
        )
    )
    reader = MessageReader()
    messages: list[WorkerMessage] = []
    while len(messages) < 2:
        messages += reader.feed(near.recv(1 << 16))
    assert "error" not in messages[1].head
    child, other = socket.socketpair()
    with child, other:
        socket.send_fds(near, [FORK], [other.fileno()])
        assert select.select([near], [], [], LIMIT_S)[0], "the process must report its child"
        near.close()
        assert process.communicate(timeout=LIMIT_S)[1] == b""
    assert process.returncode == 0


async def test_ids_equal_those_of_the_tokenizer(pool: Pool) -> None:
    text, spm = await loaded(pool), spm_tokenizer()
    expected = spm.encode_rendered(ChatTemplate(PLAIN, spm).render(TemplateInput(HI)))
    assert await chat(text) == expected
    for words in ("", "hello <s> world", "é日 [INST]"):
        for add in (False, True):
            ids = await text.workers.text_ids(b"", words, add_special_tokens=add, max_len=99)
            assert ids == spm.encode(words, add_special_tokens=add, parse_special=True)
            plain = await text.workers.text_ids(
                b"", words, add_special_tokens=add, max_len=99, parse_special=False
            )
            assert plain == spm.encode(words, add_special_tokens=add, parse_special=False)
            assert plain != ids or "<s>" not in words
            for skip in (False, True):
                spelled = text.vocabulary.decode(ids, skip_special_tokens=skip)
                assert spelled == spm.decode(ids, skip_special_tokens=skip)
    every = range(spm.model_info.vocab_size)
    assert list(map(text.vocabulary.token_bytes, every)) == list(map(spm.token_bytes, every))


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        (PLAIN, ("", "")),
        (PLAIN + "{{ tools }}<tool_call></think>", ("hermes", "think")),
        (PLAIN + "<tool_call>", ("", "")),  # does not render tools
    ],
)
async def test_parsers_are_detected(pool: Pool, template: str, parsers: tuple[str, str]) -> None:
    text = await loaded(pool, template)
    assert (text.tool_parser, text.reasoning_parser) == parsers


async def test_a_lone_surrogate_is_a_client_error(pool: Pool) -> None:
    text = await loaded(pool)
    with pytest.raises(TextError, match="not valid Unicode"):
        await text.workers.text_ids(b"", "\ud800", add_special_tokens=True, max_len=99)
    with pytest.raises(TextError, match="role"):
        await chat(text, messages=[{"role": "\ud800", "content": ""}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS["comparison"], "ran for too long"),
        (HUGE["sum"], r"ran for too long|needs too much memory"),
        (HUGE["times"], "needs too much memory"),
    ],
    ids=["comparison", "sum", "times"],
)
async def test_a_hostile_template_is_stopped(pool: Pool, template: str, said: str) -> None:
    text = await loaded(pool, template)
    with pytest.raises(TextError, match=said):
        await chat(text)
    ids = await text.workers.text_ids(b"", "hello", add_special_tokens=False, max_len=99)
    assert text.vocabulary.decode(ids) == "hello"


@pytest.fixture(scope="module")
def ends() -> Any:
    """How workers ended for each template of each kind, and their error messages."""
    script = hostile_templates.__file__
    assert script is not None
    env = os.environ | {"PYTHONPATH": str(Path(script).parents[1])}
    command = [sys.executable, "-P", "-m", hostile_templates.__name__]
    done = subprocess.run(command, capture_output=True, env=env, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ENDLESS)
def test_the_timer_of_a_template_ends_it(ends: Any, name: str) -> None:
    assert ends["endless"][name] == ["SIGPROF", ""]


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_needs_all_memory_is_refused(ends: Any, name: str) -> None:
    assert ends["huge"][name] == ["refused", "the prompt needs too much memory to be prepared"]


async def test_a_long_error_of_a_template_is_cut(pool: Pool) -> None:
    text = await loaded(pool, "{{ raise_exception('\x01' * 9999999) }}")
    with pytest.raises(TextError) as raised:
        await chat(text)
    assert len(str(raised.value)) < 300


async def test_a_worker_knows_no_secret_of_the_gateway(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "sk-secret")
    await loaded(make_pool())
    assert fork_servers()
    for process in (*fork_servers(), *workers()):
        assert "sk-secret" not in process.environ().values()


async def test_ids_beyond_the_longest_prompt_are_not_returned(pool: Pool) -> None:
    text = await loaded(pool)
    with pytest.raises(TooLong, match="the prompt has 13 tokens") as error:
        await text.workers.text_ids(b"", "a" * 12, add_special_tokens=False, max_len=11)
    assert error.value.num_tokens == 13


async def test_text_beyond_the_longest_prompt_is_not_tokenized(pool: Pool) -> None:
    text = await loaded(pool, "{{ 'a' * 2000000 }}")
    with pytest.raises(
        TooLong, match="writes 2000000 characters, which exceed the context"
    ) as error:
        await chat(text)
    assert error.value.num_tokens == 2_000_000 // 64


async def test_many_prompts_share_few_processes(pool: Pool) -> None:
    text = await loaded(pool)
    answers = await asyncio.gather(*(chat(text) for _ in range(50)))
    assert len(set(map(tuple, answers))) == 1
    assert len(workers()) == 2


async def test_owners_take_turns(make_pool: Callable[..., Pool]) -> None:
    text = await loaded(make_pool(1))
    ended: list[bytes] = []

    async def ask(owner: bytes) -> None:
        await chat(text, owner)
        ended.append(owner)

    flood = [asyncio.create_task(ask(b"flood")) for _ in range(40)]
    await asyncio.sleep(0)
    other = [asyncio.create_task(ask(b"other")) for _ in range(3)]
    await asyncio.gather(*flood, *other)
    assert ended == [b"flood", b"other"] * 3 + [b"flood"] * 37


@pytest.mark.parametrize("busy", [False, True])
async def test_a_worker_that_dies_is_replaced(pool: Pool, busy: bool) -> None:
    text = await loaded(pool)
    await chat(text)
    (worker,) = workers()
    if busy:
        worker.suspend()
        pending = asyncio.create_task(chat(text))
        await asyncio.sleep(0)  # the request reaches the worker
        worker.kill()
        with pytest.raises(TextError, match="cannot be prepared"):
            await pending
    else:
        worker.kill()
        await eventually(lambda: not workers())

    async def answers() -> list[int]:
        with suppress(TextError):  # fails until the exit is noticed
            return await chat(text)
        return []

    assert await eventually(answers)
    assert workers() != [worker]


async def test_a_disconnect_ends_no_worker(pool: Pool) -> None:
    text = await loaded(pool)
    await chat(text)
    for _ in range(20):
        pending = asyncio.create_task(chat(text))
        await asyncio.sleep(0)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
    assert await chat(text)
    assert len(workers()) <= 2


async def test_a_failure_after_a_disconnect_is_not_logged(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    text = await loaded(pool)
    await chat(text)
    (worker,) = workers()
    worker.suspend()
    pending = asyncio.create_task(chat(text))
    await asyncio.sleep(0)  # the request reaches the worker
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    worker.kill()
    await eventually(lambda: "a tokenizer worker ended" in caplog.text)
    assert await chat(text)
    gc.collect()  # unretrieved task results would be logged now


async def test_a_late_worker_is_abandoned(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspend the worker, so that even the kernel's timer does not end it."""
    monkeypatch.setattr("pdserve.text.workers.pool.SLACK_S", 0.0)
    text = await loaded(make_pool(1, late_s=0.5))
    await eventually(lambda: in_time(text))
    (worker,) = workers()
    worker.suspend()
    with pytest.raises(ServiceError, match="could not be prepared in time"):
        await chat(text)
    await eventually(lambda: in_time(text))
    assert worker in workers()
    worker.resume()
    await eventually(lambda: worker not in workers())


async def test_the_wait_for_a_worker_is_bounded(make_pool: Callable[..., Pool]) -> None:
    text = await loaded(make_pool(1, wait_s=0.05))
    await eventually(lambda: in_time(text))
    (worker,) = workers()
    worker.suspend()
    pending = asyncio.create_task(chat(text))
    await asyncio.sleep(0)  # the request reaches the worker
    with pytest.raises(ServiceError, match="could not be prepared in time"):
        await chat(text)
    worker.resume()
    assert await pending == await chat(text)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make this process unable to open further sockets, until `undo`."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    return monkeypatch


async def test_prompts_are_refused_if_no_worker_can_be_started(
    make_pool: Callable[..., Pool], request: pytest.FixtureRequest
) -> None:
    text = await loaded(make_pool(1))
    full = request.getfixturevalue("full")
    for _ in range(3):
        with pytest.raises(ServiceError, match="cannot start a tokenizer worker"):
            await chat(text)
    full.undo()
    assert await chat(text)


async def test_the_first_worker_serves_all_if_no_second_can_be_started(
    pool: Pool, request: pytest.FixtureRequest
) -> None:
    text = await loaded(pool)
    await chat(text)
    request.getfixturevalue("full")
    assert all(await asyncio.gather(*(chat(text) for _ in range(5))))
    assert len(workers()) == 1


async def test_a_model_is_loaded_later_if_no_process_can_be_started(
    pool: Pool, full: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServiceError, match="cannot start a tokenizer worker"):
        await loaded(pool)
    full.undo()
    assert await chat(await loaded(pool))


async def test_a_dead_spare_process_does_not_blame_the_files(pool: Pool) -> None:
    pool.prepare()
    (spare,) = await eventually(fork_servers)
    spare.kill()
    with pytest.raises(ServiceError, match="cannot start a tokenizer worker"):
        await loaded(pool)
    assert await chat(await loaded(pool))


async def test_the_process_dies(pool: Pool) -> None:
    text = await loaded(pool)
    await chat(text)
    (process,) = fork_servers()
    process.kill()
    await eventually(lambda: not text.workers.alive)
    with pytest.raises(ServiceError, match="have ended"):
        await chat(text)


async def test_invalid_files_are_refused(make_pool: Callable[..., Pool]) -> None:
    pool, small = make_pool(), make_pool(load_bytes=1 << 20)
    data, model_info = spm_file()
    for broken in ({"tokenizer": b"{"}, {"template": b"\xff"}, {"template": b"{% if %}"}):
        with pytest.raises(UnsupportedTokenizer):
            await pool.load(model_info, files(data) | broken)
    vocab = {f"word {i}": i for i in range(100_000)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "word 0"}
    large = json.dumps(json.loads(data) | {"model": model}).encode()
    with pytest.raises(UnsupportedTokenizer, match="too much"):
        await small.load(model_info, files(large))
