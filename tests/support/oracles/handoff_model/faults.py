"""Faults that may occur at any moment, as often as the configuration says."""

from collections.abc import Iterator

from oracles.handoff_model.memory import Values
from oracles.handoff_model.router import Move, lose_decode, lose_prefill, tell
from oracles.handoff_model.state import End, World
from pdserve.services.router.request.events import RequestCancelled


def moves(w: World) -> Iterator[Move]:
    if not w.left[0]:
        return
    for r in range(len(w.model.config.prompts)):
        req = w.request(r)
        if req.submitted and not w.ended(r):
            if w.may_strike("cancel"):
                yield cancel, r
            if not req.expired and w.may_strike("deadline"):
                yield pass_deadline, r
    if w.may_strike("crash decode"):
        yield crash_decode, 0
    if w.may_strike("freeze decode") and not w.decode.frozen:
        yield freeze_decode, 0
    for p in range(w.model.config.prefills):
        if w.may_strike("crash prefill"):
            yield crash_prefill, p
        if w.may_strike("freeze prefill") and not w.prefill(p).frozen:
            yield freeze_prefill, p
    yield from _attempt_moves(w)
    if w.may_strike("evict"):
        for block in w.decode_blocks().pool._idle:
            yield evict, block


def _attempt_moves(w: World) -> Iterator[Move]:
    for a in w.present:
        it = w.attempt(a)
        if it.prefill < 0:
            continue
        up = it.prefill_end == End.UP or it.decode_end == End.UP
        if up and w.may_strike("cut"):
            yield cut, a
        in_session = not it.decode_gone and (it.alive or it.to_decode or w.is_current(a))
        if in_session and w.may_strike("lose session"):
            yield lose_session, a, False
            if it.to_decode:
                yield lose_session, a, True
        if not it.prefill_gone and w.may_strike("lose prefill session") and w.is_current(a):
            yield lose_prefill_session, a, False
            if it.to_prefill:
                yield lose_prefill_session, a, True
        for frame in it.frames:
            if frame[1] != Values.TORN:
                if w.may_strike("duplicate"):
                    yield duplicate, a, frame
                if w.may_strike("torn"):
                    yield tear, a, frame


def cancel(w: World, r: int) -> None:
    """The client leaves."""
    w.strike("cancel")
    tell(w, r, RequestCancelled())


def pass_deadline(w: World, r: int) -> None:
    w.strike("deadline")
    w.request(r).expired = True


def crash_decode(w: World, _: int) -> None:
    """Decode crashes and restarts at once as another process without state."""
    w.strike("crash decode")
    model = w.model
    decode = w.decode
    decode.blocks, decode.values = 0, (0,) * model.config.blocks
    decode.promised, decode.claims, decode.frozen = 0, (), False
    for a in w.present:
        it = w.attempt(a)
        if it.prefill < 0:
            continue
        it.decode_gone = True
        it.to_decode = it.late = it.orphaned = it.claims = it.frames = it.table = ()
        it.from_decode = ("died",) if w.is_current(a) else ()
        it.alive = it.computed_heard = it.evicted = False
        it.receive = it.lease = it.first = 0
        it.last, it.bitmap = "", -1
        it.decode_end = End.CLOSED
        if it.prefill_end == End.UP:
            it.prefill_end = End.BROKEN


def crash_prefill(w: World, p: int) -> None:
    """Prefill crashes and restarts without state; its sent messages may still arrive, until decode
    notices.
    """
    w.strike("crash prefill")
    prefill = w.prefill(p)
    prefill.blocks, prefill.values = 0, (0,) * w.model.config.prefill_blocks
    prefill.frozen = False
    for a in w.present:
        it = w.attempt(a)
        if it.prefill != p:
            continue
        it.prefill_gone = True
        it.to_prefill = it.grants = ()
        it.from_prefill = ("died",) if w.is_current(a) else ()
        it.known = it.resent = False
        it.send, it.computed, it.next = 0, 0, -1
        it.prefill_end = End.CLOSED
        if it.decode_end == End.UP:
            it.decode_end = End.BROKEN


def freeze_decode(w: World, _: int) -> None:
    w.strike("freeze decode")
    w.decode.frozen = True


def freeze_prefill(w: World, p: int) -> None:
    w.strike("freeze prefill")
    w.prefill(p).frozen = True


def cut(w: World, a: int) -> None:
    """An attempt's data connection breaks."""
    w.strike("cut")
    it = w.attempt(a)
    if it.prefill_end == End.UP:
        it.prefill_end = End.BROKEN
    if it.decode_end == End.UP:
        it.decode_end = End.BROKEN


def lose_session(w: World, a: int, read_late: bool) -> None:
    """The session between router and decode breaks."""
    w.strike("lose session")
    lose_decode(w, a, "session lost", read_late)


def lose_prefill_session(w: World, a: int, read_late: bool) -> None:
    """The session between router and prefill breaks."""
    w.strike("lose prefill session")
    lose_prefill(w, a, "session lost", read_late)


def duplicate(w: World, a: int, frame: tuple[int, int]) -> None:
    w.strike("duplicate")
    it = w.attempt(a)
    it.frames = tuple(sorted((*it.frames, frame)))


def tear(w: World, a: int, frame: tuple[int, int]) -> None:
    w.strike("torn")
    it = w.attempt(a)
    frames = list(it.frames)
    frames[frames.index(frame)] = (frame[0], Values.TORN)
    it.frames = tuple(sorted(frames))


def evict(w: World, block: int) -> None:
    """Other work needs a cached block."""
    w.strike("evict")
    w.do_decode("evict", block)
