"""Text processes: what strangers' files do, they do under limits, and to nobody else."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest
from eventually import LIMIT_S, eventually
from hostile_templates import ENDLESS, HUGE
from tiny_spm import spm_metadata, spm_tokenizer

from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.gateway.text.errors import TextError, UnsupportedTokenizer
from pdserve.gateway.text.template import ChatTemplate
from pdserve.gateway.text.vocabulary import TextCard
from pdserve.gateway.text_processes.pool import LoadedText, TextPool
from pdserve.gateway.text_processes.protocol import TextLimits
from pdserve.services.host.errors import ServiceError

pytestmark = pytest.mark.anyio

LIMITS = TextLimits(
    load_s=LIMIT_S,
    load_bytes=1 << 30,
    render_s=0.5,
    prompt_s=LIMIT_S,
    prompt_bytes=64 << 20,
    late_s=LIMIT_S,
)
HI = [{"role": "user", "content": "hi <s> you"}]
PLAIN = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


def files(tokenizer: bytes, template: str = PLAIN) -> dict[str, bytes]:
    return {"tokenizer": tokenizer, "template": template.encode(), "generation": b""}


class Pool(TextPool):
    """A pool that ends what it has loaded."""

    def __init__(self, limits: TextLimits = LIMITS, workers: int = 2) -> None:
        super().__init__(limits, workers)
        self.loaded: list[LoadedText] = []

    async def load(self, card: TextCard, files: Mapping[str, bytes]) -> LoadedText:
        text = await super().load(card, files)
        self.loaded.append(text)
        return text

    async def close(self) -> None:
        for text in self.loaded:
            await text.processes.close()
        await super().close()


@pytest.fixture
async def make_pool(anyio_backend: str) -> AsyncIterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(workers: int = 2, **limits: Any) -> Pool:
        pools.append(Pool(replace(LIMITS, **limits), workers))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
    assert not psutil.Process().children(recursive=True)


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool()


async def loaded(pool: Pool, template: str = PLAIN) -> LoadedText:
    data, card = spm_file()
    return await pool.load(card, files(data, template))


def spm_file() -> tuple[bytes, TextCard]:
    data = tokenizer_json(spm_metadata())
    size = len(json.loads(data)["model"]["vocab"])
    return data, TextCard(size, eos_ids=(2,), bos_id=1, adds_bos=True)


async def chat(text: LoadedText, owner: bytes = b"", messages: Any = HI) -> list[int]:
    return await text.processes.chat_ids(owner, messages, answer=True, most=1 << 20)


def workers() -> list[psutil.Process]:
    """Of the only model."""
    return [w for p in psutil.Process().children() for w in p.children()]


async def test_they_say_what_the_tokenizer_says(pool: Pool) -> None:
    text, spm = await loaded(pool), spm_tokenizer()
    expected = spm.encode_rendered(ChatTemplate(PLAIN, spm).render(HI))
    assert await chat(text) == expected
    for words in ("", "hello <s> world", "é日 [INST]"):
        for add in (False, True):
            ids = await text.processes.text_ids(b"", words, add_special_tokens=add, most=99)
            assert ids == spm.encode(words, add_special_tokens=add, parse_special=True)
            for skip in (False, True):
                spelled = text.vocabulary.decode(ids, skip_special_tokens=skip)
                assert spelled == spm.decode(ids, skip_special_tokens=skip)
    every = range(spm.card.vocab_size)
    assert list(map(text.vocabulary.token_bytes, every)) == list(map(spm.token_bytes, every))


async def test_a_lone_surrogate_is_the_clients_fault(pool: Pool) -> None:
    text = await loaded(pool)
    with pytest.raises(TextError, match="not valid Unicode"):
        await text.processes.text_ids(b"", "\ud800", add_special_tokens=True, most=99)
    with pytest.raises(TextError, match="role"):
        await chat(text, messages=[{"role": "\ud800", "content": ""}])


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
async def test_an_endless_template_is_stopped(pool: Pool, template: str) -> None:
    text = await loaded(pool, template)
    with pytest.raises(TextError, match=r"ran for too long|needs too much memory"):
        await chat(text)
    ids = await text.processes.text_ids(b"", "hello", add_special_tokens=False, most=99)
    assert text.vocabulary.decode(ids) == "hello"


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
async def test_a_template_that_needs_all_memory_is_stopped(pool: Pool, template: str) -> None:
    text = await loaded(pool, template)
    with pytest.raises(TextError, match=r"ran for too long|needs too much memory|template fails"):
        await chat(text)
    ids = await text.processes.text_ids(b"", "hello", add_special_tokens=False, most=99)
    assert text.vocabulary.decode(ids) == "hello"


async def test_what_a_template_raises_is_cut(pool: Pool) -> None:
    text = await loaded(pool, "{{ raise_exception('\x01' * 9999999) }}")
    with pytest.raises(TextError) as raised:
        await chat(text)
    assert len(str(raised.value)) < 3000


async def test_a_text_process_knows_no_secret_of_the_gateway(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "sk-secret")
    await loaded(make_pool())
    for process in psutil.Process().children(recursive=True):
        assert "sk-secret" not in process.environ().values()


async def test_more_tokens_than_any_prompt_has_stay_there(pool: Pool) -> None:
    text = await loaded(pool)
    with pytest.raises(TextError, match="the prompt has 13 tokens"):
        await text.processes.text_ids(b"", "a" * 12, add_special_tokens=False, most=11)


async def test_prompts_are_many_and_processes_few(pool: Pool) -> None:
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
        asked = asyncio.create_task(chat(text))
        await asyncio.sleep(0)  # it has the worker
        worker.kill()
        with pytest.raises(TextError, match="cannot be prepared"):
            await asked
    else:
        worker.kill()
        await eventually(lambda: not workers())

    async def answers() -> list[int]:
        with suppress(TextError):  # until the news of its end has come
            return await chat(text)
        return []

    assert await eventually(answers)
    assert workers() != [worker]


async def test_a_client_that_goes_costs_no_worker(pool: Pool) -> None:
    text = await loaded(pool)
    await chat(text)
    for _ in range(20):
        asked = asyncio.create_task(chat(text))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert await chat(text)
    assert len(workers()) <= 2


async def test_one_that_is_late_is_left_alone(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, so not even the kernel's timer ends it."""
    monkeypatch.setattr("pdserve.gateway.text_processes.pool.SLACK_S", 0.0)
    text = await loaded(make_pool(1, late_s=0.5))

    async def in_time() -> list[int]:
        """On a busy machine not always at once."""
        with suppress(ServiceError):
            return await chat(text)
        return []

    await eventually(in_time)
    (worker,) = workers()
    worker.suspend()
    with pytest.raises(ServiceError, match="could not be prepared in time"):
        await chat(text)
    await eventually(in_time)
    assert worker in workers()
    worker.resume()
    await eventually(lambda: worker not in workers())


async def test_its_process_dies(pool: Pool) -> None:
    text = await loaded(pool)
    await chat(text)
    (process,) = psutil.Process().children()
    process.kill()
    await eventually(lambda: not text.processes.alive)
    with pytest.raises(ServiceError, match="have ended"):
        await chat(text)


async def test_what_cannot_be_loaded(make_pool: Callable[..., Pool]) -> None:
    pool, small = make_pool(), make_pool(load_bytes=1 << 20)
    data, card = spm_file()
    for broken in ({"tokenizer": b"{"}, {"template": b"\xff"}, {"template": b"{% if %}"}):
        with pytest.raises(UnsupportedTokenizer):
            await pool.load(card, files(data) | broken)
    vocab = {f"word {i}": i for i in range(100_000)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "word 0"}
    large = json.dumps(json.loads(data) | {"model": model}).encode()
    with pytest.raises(UnsupportedTokenizer, match="too much"):
        await small.load(card, files(large))
