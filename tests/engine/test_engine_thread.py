"""The engine thread handles posts, polls and steps, and survives errors in them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, tokens
from fakes.decoder import FakeDecoder, LosableDevice, fake_spec, reference
from systems.eventually import LIMIT_S, wait_until

from pdserve.engine.api import Event, Finished, RequestFailed, Scheduled, Step
from pdserve.engine.engine import Engine
from pdserve.engine.thread import EngineThread


class Listener:
    """Collects events, and waits for the end of a request."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, step: Step) -> None:
        self.events.extend(step.events)

    def wait_for(self, key: str) -> None:
        ends = (Finished, RequestFailed)
        wait_until(lambda: any(of(self.events, kind, key) for kind in ends), self.events)


@contextmanager
def running(engine: Engine, listener: Listener) -> Iterator[EngineThread]:
    thread = EngineThread(engine, listener)
    thread.start()
    try:
        yield thread
    finally:
        thread.close()
    assert not any(t.name == "engine" for t in threading.enumerate())


def test_posted_requests_run_in_the_order_of_posting() -> None:
    engine, listener = fake_engine(), Listener()
    order: list[int] = []
    with running(engine, listener) as thread:
        for i in range(5):
            thread.post(lambda _, i=i: order.append(i))
        future = thread.post(lambda e: e.submit(ask("a", range(9))))
        assert future.result(LIMIT_S) is None
        listener.wait_for("a")
        assert order == list(range(5))
        assert thread.liveness > 0
    assert tokens(listener.events)["a", 0] == reference(list(range(9)), fake_spec(), 8)
    assert_at_rest(engine)


def test_after_the_loss_of_a_device_nothing_is_computed_and_no_request_gets_an_event() -> None:
    model, listener = LosableDevice(lost=True), Listener()
    with running(fake_engine(model=model), listener) as thread:
        thread.post(lambda e: e.submit(ask("a", range(9)))).result(LIMIT_S)
        wait_until(lambda: thread.lost, listener.events)
        assert "earlier illegal memory access" in thread.lost
        thread.post(lambda e: e.submit(ask("b", range(9)))).result(LIMIT_S)
        thread.post(lambda _: None).result(LIMIT_S)  # turns without computation
        assert model.failures == 1
        assert not of(listener.events, RequestFailed)
        assert tokens(listener.events)["a", 0] == reference(list(range(9)), fake_spec(), 2)


def test_a_failed_step_on_a_working_device_fails_its_requests() -> None:
    model, listener = LosableDevice(lost=False), Listener()
    with running(fake_engine(model=model), listener) as thread:
        thread.post(lambda e: e.submit(ask("a", range(9)))).result(LIMIT_S)
        listener.wait_for("a")
        assert not thread.lost
        (failed,) = of(listener.events, RequestFailed)
        assert "an illegal memory access" in failed.message


def test_scheduled_is_sent_once_and_before_the_first_chunk_is_computed() -> None:
    listener, counts = Listener(), list[int]()

    class Watched(FakeDecoder):
        def forward(self, batch, kv):  # type: ignore[no-untyped-def]
            counts.append(len(of(listener.events, Scheduled, "a")))
            return super().forward(batch, kv)

    with running(fake_engine(model=Watched(fake_spec())), listener) as thread:
        thread.post(lambda e: e.submit(ask("a", range(9))))
        listener.wait_for("a")
    assert counts[0] == 1
    assert len(of(listener.events, Scheduled)) == 1
    assert len(of(listener.events, Finished)) == 1


def test_an_error_in_a_post_is_set_on_its_future() -> None:
    listener = Listener()
    with running(fake_engine(), listener) as thread:
        future = thread.post(lambda e: e.submit(ask("a", [])))
        with pytest.raises(Exception, match="empty"):
            future.result(LIMIT_S)
        assert thread.post(lambda e: e.stats().step).result(LIMIT_S) == 0


def test_polls_run_between_steps_and_repeat_while_they_have_more() -> None:
    listener, enough = Listener(), threading.Event()
    polls = 0

    def poll() -> bool:
        nonlocal polls
        polls += 1
        if polls == 20:
            enough.set()
        return polls < 20

    with running(fake_engine(), listener) as thread:
        thread.add_poll(poll)
        assert enough.wait(LIMIT_S)
        thread.post(lambda e: e.submit(ask("a", range(9))))
        listener.wait_for("a")
        before = polls
        woken = threading.Event()
        thread.add_poll(lambda: woken.set() or False)  # type: ignore[func-returns-value]
        assert woken.wait(LIMIT_S)
        woken.clear()
        thread.wake()
        assert woken.wait(LIMIT_S)
    assert before > 20


def test_an_idle_thread_does_not_spin() -> None:
    with running(fake_engine(), Listener()) as thread:
        thread.post(lambda _: None).result(LIMIT_S)
        turns = thread.post(lambda _: thread.liveness).result(LIMIT_S)
        threading.Event().wait(0.2)
        assert thread.post(lambda _: thread.liveness).result(LIMIT_S) <= turns + 3


def test_close_cancels_posted_calls_and_ends_the_thread() -> None:
    entered, go_on = threading.Event(), threading.Event()
    thread = EngineThread(fake_engine(), Listener())
    thread.start()
    thread.post(lambda _: (entered.set(), go_on.wait(LIMIT_S)))
    assert entered.wait(LIMIT_S)
    closer = threading.Thread(target=thread.close)
    closer.start()
    wait_until(lambda: thread.post(lambda _: None).cancelled())
    go_on.set()
    closer.join(LIMIT_S)
    assert not closer.is_alive()


def test_a_failing_step_fails_its_requests_and_the_thread_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, listener = fake_engine(), Listener()
    schedule = engine._scheduler.schedule
    failures = [RuntimeError("a bug")]

    def broken(*args):  # type: ignore[no-untyped-def]
        if failures and engine.jobs.waiting:
            raise failures.pop()
        return schedule(*args)

    engine._scheduler.schedule = broken  # type: ignore[method-assign]
    with running(engine, listener) as thread:
        thread.post(lambda e: e.submit(ask("a", range(9))))
        listener.wait_for("a")
        assert "a bug" in of(listener.events, RequestFailed, "a")[0].message
        thread.post(lambda e: e.submit(ask("b", range(9))))
        listener.wait_for("b")
    assert "a bug" in caplog.text
    assert of(listener.events, Finished, "b")
    assert_at_rest(engine)


def test_a_failing_poll_or_listener_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()

    def on_step(step: Step) -> None:
        listener(step)
        raise ValueError("listener's fault")

    def poll() -> bool:
        raise ValueError("poll's fault")

    thread = EngineThread(fake_engine(), on_step)
    thread.add_poll(poll)
    thread.start()
    try:
        thread.post(lambda e: e.submit(ask("a", range(9))))
        listener.wait_for("a")
    finally:
        thread.close()
    assert "poll's fault" in caplog.text
    assert "listener's fault" in caplog.text


def test_liveness_advances_while_requests_wait_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that cannot move is not a frozen engine."""
    monkeypatch.setattr("pdserve.engine.thread.IDLE_TURN_S", 0.01)
    engine, listener = fake_engine(num_blocks=4), Listener()
    with running(engine, listener) as thread:
        reservation = thread.post(lambda e: e.reserve(ask("r", range(12), max_tokens=1)))
        held = reservation.result(LIMIT_S)
        thread.post(lambda e: e.submit(ask("a", range(12), max_tokens=1))).result(LIMIT_S)
        before = thread.liveness
        wait_until(lambda: thread.liveness > before + 3)
        assert not listener.events
        thread.post(lambda e: e.release(held))
        listener.wait_for("a")
