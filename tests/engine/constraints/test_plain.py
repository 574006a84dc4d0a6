"""Allowed ids, bad words and thinking budgets compared with definitions that examine all ids at
each step."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pdserve.engine.api import Request, SamplingParams, ThinkingBudget
from pdserve.engine.constraints import Bitmask, ConstraintManager
from pdserve.engine.constraints.manager import ChoiceConstraints, Constraint
from pdserve.engine.constraints.masks import (
    AllowedIds,
    BadWords,
    SequenceSearch,
    ThinkingLimit,
    all_but,
    bitmask_of,
)

VOCAB = 37  # not a multiple of 32
ALL = set(range(VOCAB))
Definition = Callable[[Sequence[int]], set[int]]


def ids_of(words: Bitmask | None) -> set[int]:
    if words is None:
        return ALL
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]
    return {int(token) for token in bits.nonzero()[0]}


def bad_words_by_definition(words: Sequence[tuple[int, ...]]) -> Definition:
    def allowed(ids: Sequence[int]) -> set[int]:
        def completes(token: int) -> bool:
            text = (*ids, token)
            return any(text[-len(word) :] == word for word in words)

        return {token for token in ALL if not completes(token)}

    return allowed


def thinking_by_definition(budget: ThinkingBudget) -> Definition:
    """Define allowed ids by splitting all ids into stretches of thinking and of speech from the
    start."""
    start, end = budget.start_ids, budget.end_ids

    def first(sequence: tuple[int, ...], ids: tuple[int, ...]) -> int | None:
        """Return the position where the sequence first ends."""
        ends = range(len(sequence), len(ids) + 1)
        return next((at for at in ends if ids[at - len(sequence) : at] == sequence), None)

    def allowed(ids: Sequence[int]) -> set[int]:
        rest, spent, thinks = tuple(ids), 0, not start
        while (at := first(end if thinks else start, rest)) if thinks or start else None:
            spent += at - len(end) if thinks else 0
            rest, thinks = rest[at:], not thinks
        if not thinks or spent + len(rest) < budget.max_tokens:
            return ALL
        return {end[max(k for k in range(len(end)) if not k or rest[-k:] == end[:k])]}

    return allowed


def walk(made: Constraint, definition: Definition, rng: random.Random, length: int = 60) -> int:
    """Generate random allowed ids out of a few and compare with the definition. Return how often an
    id was excluded."""
    ids: list[int] = []
    narrowed = 0
    for _ in range(length):
        allowed = ids_of(made.bitmask())
        assert allowed == definition(ids), ids
        narrowed += allowed != ALL
        few = [token for token in range(4) if token in allowed]
        ids.append(rng.choice(few or sorted(allowed)))
        made.accept_token(ids[-1])
    return narrowed


def test_bad_words(subtests: pytest.Subtests) -> None:
    for seed in range(40):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            words = [
                tuple(rng.randrange(3) for _ in range(rng.choice((2, 3))))
                for _ in range(rng.randrange(1, 5))
            ]
            if seed % 3 == 0:
                words.append((36,))
            assert walk(BadWords(words, VOCAB), bad_words_by_definition(words), rng)


def test_thinking(subtests: pytest.Subtests) -> None:
    for seed in range(60):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            ends = [(0,), (1, 2), (1, 1), (1, 2, 1), (3, 3, 1)]
            starts = [(), (2,), (0, 3), (2, 2)]
            budget = ThinkingBudget(rng.choice((0, 1, 4, 9)), rng.choice(ends), rng.choice(starts))
            walk(ThinkingLimit(budget, VOCAB), thinking_by_definition(budget), rng)


def test_thinking_ends_when_its_budget_is_used_up() -> None:
    limit = ThinkingLimit(ThinkingBudget(3, (30, 31)), VOCAB)
    ids = []
    for wanted in (1, 2, 3, 4, 5, 6, 7):
        allowed = ids_of(limit.bitmask())
        ids.append(wanted if wanted in allowed else allowed.pop())
        limit.accept_token(ids[-1])
    assert ids == [1, 2, 3, 30, 31, 6, 7]


def test_an_end_sequence_that_has_begun_is_completed() -> None:
    limit = ThinkingLimit(ThinkingBudget(3, (30, 31)), VOCAB)
    for token in (1, 2, 30):
        limit.accept_token(token)
    assert ids_of(limit.bitmask()) == {31}


def test_allowed_ids_with_all_other_constraints() -> None:
    plain: list[Constraint] = [
        ThinkingLimit(ThinkingBudget(1, (5,)), VOCAB),
        BadWords([(5, 6)], VOCAB),
        AllowedIds([5, 6, 36], VOCAB),
    ]
    choice = ChoiceConstraints(plain, None)
    expected = [{5, 6, 36}, {5}, {5, 36}, {5, 6, 36}]
    for allowed, token in zip(expected, (6, 5, 36, 6), strict=True):
        assert ids_of(choice.bitmask()) == allowed
        choice.accept_token(token)
    assert choice.param == "allowed_token_ids"


def test_a_sequence_is_found_at_every_position(subtests: pytest.Subtests) -> None:
    for seed in range(30):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            wanted = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
            stream = [rng.randrange(2) for _ in range(80)]
            search, found, expected, begin = SequenceSearch(wanted), [], [], 0
            for at, token in enumerate(stream):
                if search.push(token):
                    found.append(at)
                if (
                    at + 1 - len(wanted) >= begin
                    and stream[at + 1 - len(wanted) : at + 1] == wanted
                ):
                    expected.append(at)
                    begin = at + 1
            assert found == expected


def test_sets_of_tokens() -> None:
    assert ids_of(bitmask_of([0, 31, 32, 36], VOCAB)) == {0, 31, 32, 36}
    assert ids_of(all_but([0, 31, 32, 36], VOCAB)) == ALL - {0, 31, 32, 36}
    assert bitmask_of([], VOCAB).shape == (2,)


def test_choices_of_a_request_share_its_allowed_ids() -> None:
    manager = ConstraintManager(VOCAB, frozenset({36}), None)
    request = Request("r", (1,), SamplingParams(allowed_token_ids=(5, 6), n=3), 0)
    made = manager.of_request(request, [[], [5], [6]], 0.0)
    assert made.poll(0.0)
    masks = [made.bitmask(choice) for choice in range(3)]
    assert ids_of(masks[0]) == {5, 6, 36}
    assert all(mask is masks[0] for mask in masks)
    manager.close()
