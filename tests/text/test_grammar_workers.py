"""Grammars are compiled off the event loop, one at a time, within time and memory limits, and
cached."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest
from builders.hostile_structures import HOSTILE
from fakes.router import served, tokenizer_json
from oracles.http_errors import HI
from systems.eventually import LIMIT_S, eventually
from systems.tokenizer_pools import LIMITS, Pool, workers
from tokenizers import Tokenizer

from pdserve.text import Structure, TemplateInput, TextError
from pdserve.text.structured_output import StructureCache
from pdserve.text.structured_output.cache import ENTRY_BYTES
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.workers import LoadedTokenizer

pytestmark = pytest.mark.anyio
SLOW = HOSTILE["GBNF"]  # up to the time limit
LITTLE = 48 << 20
WORD = Structure("regex", "[a-z]+", "regex")


@pytest.fixture
async def pool(anyio_backend: str) -> AsyncIterator[Pool]:
    pool = Pool(workers=1)
    yield pool
    await pool.close()


async def loaded(pool: Pool, tokenizer: bytes | None = None) -> LoadedTokenizer:
    card, blobs = served()
    digests = (card.tokenizer_digest, card.template_digest, card.generation_config_digest)
    names = ("tokenizer", "template", "generation")
    files = {name: blobs[digest] for name, digest in zip(names, digests, strict=True)}
    if tokenizer is not None:
        files["tokenizer"] = tokenizer
    num_tokens = Tokenizer.from_buffer(files["tokenizer"]).get_vocab_size() + 5
    return await pool.load(TextModelInfo(num_tokens, tuple(card.eos_ids)), files)


async def test_hostile_structures_end(pool: Pool) -> None:
    text = await loaded(pool)
    compiled, refused = [], []
    for name, structure in HOSTILE.items():
        began = time.monotonic()
        try:
            await text.workers.grammar(b"", structure)
            compiled.append(name)
        except TextError as error:
            refused.append((error.param == structure.param, str(error)))
        assert time.monotonic() - began < LIMIT_S / 2, name
    assert {"long text", "states"} <= set(compiled)
    assert all(named for named, _ in refused)
    assert any("takes too long" in why for _, why in refused)
    assert any("needs too much memory" in why for _, why in refused)
    assert await text.workers.grammar(b"", WORD)


async def test_a_large_vocabulary_does_not_count_in_the_grammar_memory(anyio_backend: str) -> None:
    """The vocabulary alone needs as much memory as one grammar may take."""
    pool = Pool(replace(LIMITS, prompt_bytes=LITTLE), workers=1)
    try:
        text = await loaded(pool, with_more_tokens(100_000))
        assert await text.workers.grammar(b"", WORD)
    finally:
        await pool.close()


def with_more_tokens(count: int) -> bytes:
    """The tokenizer of `served` with this many extra tokens that no merge produces."""
    file = json.loads(tokenizer_json())
    first = len(file["model"]["vocab"]) + len(file["added_tokens"])
    file["model"]["vocab"] |= {f"more{number}": first + number for number in range(count)}
    return json.dumps(file).encode()


async def test_prompts_do_not_wait_for_grammars(pool: Pool) -> None:
    text = await loaded(pool)
    ask = partial(text.workers.chat_ids, b"", TemplateInput(HI), max_len=999)
    await ask()
    compiling = asyncio.create_task(text.workers.grammar(b"", SLOW))
    for _ in range(5):
        assert await ask()
    assert not compiling.done()
    await eventually(lambda: len(workers()) == 2)
    with pytest.raises(TextError, match="the grammar takes too long"):
        await compiling


async def test_a_structure_is_compiled_once(pool: Pool) -> None:
    text = await loaded(pool)
    wrong = Structure("regex", "(a", "regex")
    source = await text.workers.grammar(b"", WORD)
    with pytest.raises(TextError) as refused:
        await text.workers.grammar(b"", wrong)
    (child,) = workers()
    child.suspend()
    assert await text.workers.grammar(b"other", Structure("regex", "[a-z]+", "regex")) == source
    for _ in range(2):
        with pytest.raises(TextError) as again:
            await text.workers.grammar(b"", wrong)
        assert (str(again.value), again.value.param) == (str(refused.value), "regex")
    other = asyncio.create_task(text.workers.grammar(b"", Structure("regex", "[0-9]+", "regex")))
    done, _ = await asyncio.wait([other], timeout=0.05)
    assert not done, "another field or text must be compiled separately"
    child.resume()
    assert await other != source


async def test_concurrent_identical_structures_are_compiled_once(pool: Pool) -> None:
    text = await loaded(pool)
    began = time.process_time(), time.monotonic()
    pending = [text.workers.grammar(bytes([n]), SLOW) for n in range(20)]
    found = await asyncio.gather(*pending, return_exceptions=True)
    assert all(isinstance(error, TextError) for error in found)
    assert time.monotonic() - began[1] < LIMIT_S / 2
    assert len({str(error) for error in found}) == 1


async def test_a_disconnect_does_not_cancel_the_compilation(pool: Pool) -> None:
    text = await loaded(pool)
    await text.workers.grammar(b"", WORD)
    (child,) = workers()
    child.suspend()
    other = Structure("choice", ["a"], "guided_choice")
    pending = asyncio.create_task(text.workers.grammar(b"", other))
    await asyncio.sleep(0)  # the request reaches the child
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    child.resume()
    assert await text.workers.grammar(b"", other)
    assert workers() == [child]


def test_the_cache_is_bounded_and_keeps_recent_entries() -> None:
    cache = StructureCache(max_bytes=3 * ENTRY_BYTES + 3 * 40)
    for name in (b"a", b"b", b"c"):
        cache.put(name, "x" * 10)
    cache.put(b"b", "x" * 10)
    assert cache.get(b"a", 0.0) == "x" * 10
    cache.put(b"d", "x" * 10)
    assert [cache.get(name, 0.0) is None for name in (b"a", b"b", b"c", b"d")] == [
        False, False, True, False,
    ]  # fmt: skip
    cache.put(b"large", "x" * (10 * ENTRY_BYTES))
    assert cache.get(b"large", 0.0) is None


def test_a_cached_error_expires() -> None:
    cache = StructureCache()
    error = TextError("it takes too long")
    cache.put(b"a", error, until_s=60.0)
    assert cache.get(b"a", 59.0) is error
    assert cache.get(b"a", 60.0) is None
    assert cache.get(b"a", 0.0) is None


async def test_a_grammar_whose_child_was_killed_is_compiled_later(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.text.workers.pool.DEATH_S", 0.0)
    text = await loaded(pool)
    await text.workers.grammar(b"", WORD)
    (child,) = workers()
    child.suspend()
    other = Structure("choice", ["a"], "guided_choice")
    pending = asyncio.create_task(text.workers.grammar(b"", other))
    await asyncio.sleep(0)  # the request reaches the child
    child.kill()
    with pytest.raises(TextError, match="cannot be prepared") as caught:
        await pending
    assert caught.value.param == "guided_choice"
    assert await text.workers.grammar(b"", other)


def test_each_part_of_a_structure_is_in_its_key() -> None:
    encoded = {
        structure.encoded()
        for structure in (
            WORD,
            Structure("regex", "[a-z]*", "regex"),
            Structure("regex", "[a-z]+", "guided_regex"),
            Structure("grammar", "[a-z]+", "regex"),
            Structure("regex", "[a-z]+", "regex", lenient=True),
            Structure("regex", "[a-z]+", "regex", whitespace=False),
        )
    }
    assert len(encoded) == 6
    assert WORD.encoded() in encoded
    assert all(Structure.decoded(data).encoded() == data for data in encoded)
