"""Window groups have separate small pools: long prompts run in them with exact results, and no two
requests wait for each other's blocks indefinitely."""

import itertools

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens
from fakes.decoder import FakeDecoder, fake_spec, reference

from pdserve.engine.api import ChoiceState, PrefillComputed
from pdserve.engine.engine import Engine
from pdserve.engine.kv import KvSpec, LayerGroup, blocks_for, pool_sizes, window_blocks
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import EngineLimits
from pdserve.kernels import reference as reference_kernels

WINDOW, CHUNK, BLOCK = 8, 16, 4
NEED = window_blocks(WINDOW, CHUNK, BLOCK)
KEPT = blocks_for(WINDOW, BLOCK) + 1


def windowed(max_running: int = 2, **options: int) -> Engine:
    engine = fake_engine(
        num_blocks=400, window=WINDOW, chunk_size=CHUNK, max_running=max_running, **options
    )
    assert engine.kv.num_blocks == (400, max_running * (NEED + KEPT))
    return engine


def ids_from(start: int, length: int) -> list[int]:
    return [(start + 3 * i) % 60 for i in range(length)]


def long_prompt(start: int) -> list[int]:
    ids = ids_from(start, 200)
    assert blocks_for(len(ids), BLOCK) > 2 * NEED
    return ids


def test_the_blocks_of_a_window_hold_a_chunk_and_the_tokens_it_sees(
    subtests: pytest.Subtests,
) -> None:
    for window, chunk, block in itertools.product((1, 7, 8, 9, 48), (1, 4, 10, 16), (1, 4, 16)):
        with subtests.test(window=window, chunk=chunk, block=block):
            most = 0
            for start in range(2 * window + 2 * block):
                first = max(0, start - window + 1) // block
                most = max(most, (start + chunk - 1) // block - first + 1)
            assert most <= window_blocks(window, chunk, block) <= most + 1


def test_long_prompts_in_a_small_pool_give_the_same_tokens() -> None:
    engine = windowed(max_running=3)
    prompts = {f"r{i}": long_prompt(7 * i) for i in range(6)}
    events = run(engine, *(ask(key, prompt, max_tokens=24) for key, prompt in prompts.items()))
    assert engine.model.widest > 1
    assert engine.stats().preemptions == 0
    spec = fake_spec(BLOCK, WINDOW)
    assert tokens(events) == {(k, 0): reference(p, spec, 24) for k, p in prompts.items()}
    assert_at_rest(engine)


def test_a_prompt_holds_no_more_window_blocks_than_it_needs() -> None:
    engine = windowed()
    engine.submit(ask("a", long_prompt(1)))
    held = []
    while engine.step() is not None:
        held.append(engine.jobs.tables.pools[1].counts().used)
    assert max(held) == NEED
    assert_at_rest(engine)


def test_prefills_with_a_common_prefix_all_end() -> None:
    """They are never preempted, so each must be able to continue with its blocks. Blocks that one
    releases stay with others that share them."""
    engine = windowed(max_running=4, context_len=400, step_tokens=4 * CHUNK)
    common = ids_from(1, 96)
    run(engine, ask("first", common, max_tokens=1))
    for number in range(8):
        prompt = [*common, *long_prompt(number)]
        engine.submit(ask(f"r{number}", prompt, prefill_only=True))
    ended: dict[str, int] = {}
    most_shared = 0
    for number in range(500):
        plan = engine.schedule()
        if plan is None and not engine.jobs.held:
            break
        used, _ = engine.jobs.tables.pools[1].references()
        most_shared = max(most_shared, *used.values(), 0)
        step = engine.collect(engine.launch(plan)) if plan else None
        computed = of(step.events, PrefillComputed) if step else []
        ended |= {event.key: number for event in computed if event.done}
        for key in [key for key in engine.jobs.held if number >= ended[key] + 3]:
            engine.release_held(key)
    assert sorted(ended) == [f"r{n}" for n in range(8)]
    assert most_shared > 1
    assert_at_rest(engine)


def test_a_hand_off_reserves_the_blocks_that_its_last_token_sees() -> None:
    engine = windowed()
    prompt = long_prompt(5)
    reservation = engine.reserve(ask("a", prompt))
    assert reservation is not None
    pools = engine.jobs.tables.pools
    first = (len(prompt) - 1 - WINDOW + 1) // BLOCK
    assert reservation.first_block == [0, first]
    assert pools[0].counts().reserved == blocks_for(len(prompt), BLOCK)
    assert pools[1].counts().reserved == blocks_for(len(prompt), BLOCK) - first
    assert all(reservation.blocks[1][first:])
    engine.release(reservation)
    assert_at_rest(engine)


def test_a_model_with_only_window_layers() -> None:
    spec = KvSpec(BLOCK, (LayerGroup((0,), "window", WINDOW, 1, 4, "float32", 0, 1),))
    for num_blocks, max_running in itertools.product((NEED, 64), (1, 3)):
        limits = EngineLimits(64, 256, BLOCK, num_blocks, max_running, CHUNK)
        kv = KvCache(spec, pool_sizes(spec, num_blocks, max_running, CHUNK))
        assert kv.num_blocks == (num_blocks,)
        engine = Engine(FakeDecoder(spec), kv, limits, reference_kernels)
        length = min(200, num_blocks * BLOCK - 8)
        prompts = {f"r{i}": [(i + 3 * j) % 60 for j in range(length)] for i in range(4)}
        events = run(engine, *(ask(key, prompt) for key, prompt in prompts.items()))
        assert tokens(events) == {(k, 0): reference(p, spec, 8) for k, p in prompts.items()}
        assert_at_rest(engine)


def test_memory_saved_by_window_pools() -> None:
    """Gemma 3 270M: 3 of its 18 layers have full attention, the others a window of 512 tokens."""
    full = LayerGroup(tuple(range(3)), "full", 0, 1, 256, "float16", 0, 1)
    window = LayerGroup(tuple(range(3, 18)), "window", 512, 1, 256, "float16", 0, 1)
    spec, num_blocks = KvSpec(16, (full, window)), 64 * 8192 // 16
    whole = spec.pool_bytes((num_blocks, num_blocks))
    for chunk, times in ((128, 3.48), (512, 3.07), (2048, 2.07)):
        saved = whole / spec.pool_bytes(pool_sizes(spec, num_blocks, 64, chunk))
        assert saved == pytest.approx(times, abs=0.01)


def test_a_hit_that_ends_at_a_block_border_fits(subtests: pytest.Subtests) -> None:
    """Its window and the blocks of its chunk are more than a running request has at any other
    time."""
    for max_running in (1, 2):
        with subtests.test(max_running=max_running):
            engine = windowed(max_running, context_len=400)
            common = ids_from(1, 96)
            run(engine, ask("first", common, max_tokens=1))
            longer = [*common, *ids_from(3, 100)]
            events = run(engine, ask("b", longer), ask("c", ids_from(4, 10)))
            spec = fake_spec(BLOCK, WINDOW)
            assert tokens(events)["b", 0] == reference(longer, spec, 8)
            assert tokens(events)["c", 0] == reference(ids_from(4, 10), spec, 8)
            assert engine.stats().prefix_hits == 96
            assert_at_rest(engine)


def test_a_resumed_request_of_a_whole_batch_fits_with_its_cache_hit() -> None:
    engine = windowed(max_running=3, context_len=400)
    prompt = [*ids_from(1, 100), *ids_from(7, 60)]
    run(engine, ask("first", prompt[:100], max_tokens=1))
    states = tuple(ChoiceState(tuple(ids_from(n, 60))) for n in range(3))
    events = run(engine, ask("a", prompt, n=3, choices=states, max_tokens=64))
    spec = fake_spec(BLOCK, WINDOW)
    assert tokens(events) == {
        ("a", n): reference([*prompt, *states[n].generated_ids], spec, 4) for n in range(3)
    }
    assert engine.stats().prefix_hits > 0


def test_hand_offs_fit_with_a_full_batch() -> None:
    engine = fake_engine(num_blocks=2000, window=32, chunk_size=CHUNK, max_running=4)
    for number in range(4):
        engine.submit(ask(f"r{number}", ids_from(number, 60), max_tokens=100))
    for _ in range(20):
        engine.step()
    assert engine.stats().running == 4
    made = [engine.reserve(ask(f"h{n}", ids_from(n + 30, 120))) for n in range(4)]
    assert None not in made
    for _ in range(40):
        engine.step()
    assert engine.stats().preemptions == 0
    assert engine.stats().running == 4


def test_a_resumed_request_with_long_choices_fits() -> None:
    """The blocks that its other choices keep are counted as a window keeps them."""
    engine = windowed(max_running=3)
    prompt = ids_from(2, 9)
    states = tuple(ChoiceState(tuple(ids_from(n, 100))) for n in range(3))
    events = run(engine, ask("a", prompt, n=3, choices=states, max_tokens=104))
    spec = fake_spec(BLOCK, WINDOW)
    assert tokens(events) == {
        ("a", n): reference([*prompt, *states[n].generated_ids], spec, 4) for n in range(3)
    }
    assert_at_rest(engine)
