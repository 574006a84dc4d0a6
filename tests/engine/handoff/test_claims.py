"""The queue of Claims: which hand-off gets blocks next."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from builders.engine_kit import ask, fake_engine, of

from pdserve.engine.api import NewTokens, Request
from pdserve.engine.handoff.incoming import ClaimQueue


def claim(number: int, tenant: bytes, priority: int) -> Any:
    """Return the parts of an IncomingHandoff that the queue reads."""
    whole = ask(str(number), [1] * 8)
    request = Request(
        whole.key, whole.prompt_ids, whole.params, 0, tenant=tenant, priority=priority
    )
    state = SimpleNamespace(final=False)
    return SimpleNamespace(request=request, sender=b"", state=state, grant=lambda *_: None)


def order(claims: list[Any]) -> list[Any]:
    """Return the claims in the order in which they get blocks."""
    engine = fake_engine(num_blocks=256)
    queue = ClaimQueue(engine, engine.kv, lambda: 0.0, lambda *_: None)
    for one in claims:
        queue.add(one)
    found = list(queue.granted())
    for reservation in list(engine.jobs.reserved.values()):
        engine.release(reservation)
    assert not len(queue)
    return found


def test_claims_of_a_tenant_are_ordered_by_priority_within_its_places() -> None:
    rng = Random(3)
    for _ in range(50):
        claims = [claim(n, rng.choice((b"a", b"b")), rng.randrange(-2, 3)) for n in range(20)]
        found = order(claims)
        assert [c.request.tenant for c in found] == [c.request.tenant for c in claims]
        for tenant in (b"a", b"b"):
            own = [c for c in claims if c.request.tenant == tenant]
            expected = sorted(own, key=lambda c: c.request.priority)
            assert [c for c in found if c.request.tenant == tenant] == expected


def test_a_device_failure_at_a_grant_keeps_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(num_blocks=16)
    queue = ClaimQueue(engine, engine.kv, lambda: 0.0, lambda *_: None)
    one = claim(1, b"a", 0)
    queue.add(one)
    with monkeypatch.context() as patch:
        patch.setattr(engine.kv, "ready", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(queue.granted())
    assert not engine.jobs.reserved
    assert list(queue.granted()) == [one], "the claim must stay the next one"
    for reservation in list(engine.jobs.reserved.values()):
        engine.release(reservation)


def test_a_claim_passed_by_others_of_its_tenant_keeps_its_place_among_requests() -> None:
    engine = fake_engine(num_blocks=8, chunk_size=32)
    first, second = (ask(key, [1] * 8) for key in ("first", "second"))
    engine.submit(ask("running", [2] * 27, max_tokens=4))
    engine.step()
    assert engine.reserve(first) is None
    engine.submit(ask("later", [3] * 8, max_tokens=4))
    assert engine.reserve(second) is None  # a claim that precedes it within its tenant's places
    while engine.has_work and (made := engine.reserve(first)) is None:
        step = engine.step()
        assert step is not None
        assert not of(step.events, NewTokens, "later"), (
            "a request that arrived after the claim ran before it"
        )
    assert made is not None
    engine.release(made)
