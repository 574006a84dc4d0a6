"""Decode: DecodeCore, Receiver and the engine behind them, as one process with one move at a time.

The loop and the engine thread exchange commands and answers in order, so what one of them has not
seen yet is in the queues here. Frames and control messages may overtake one another, and so may
frames: a wire may have several streams. Over 400 lines: each function is one move of the same
process.
"""

from collections.abc import Iterator
from typing import Any

from oracles.handoff_model.memory import BLOCK_SIZE, Granted, Values
from oracles.handoff_model.router import Move, offer
from oracles.handoff_model.rules import Violation
from oracles.handoff_model.state import Attempt, End, World
from oracles.handoff_model.writes import (
    Frame,
    bitmap_of,
    check_values,
    copy_blocks,
    header,
    put,
    without,
)
from pdserve.engine.handoff.incoming import Promises, promise_blocks
from pdserve.engine.handoff.protocol import Action, FrameError
from pdserve.services.decode import lease_machine as lease


def moves(w: World) -> Iterator[Move]:
    decode = w.decode
    if decode.frozen:
        yield thaw, 0
        return
    handoffs = w.model.handoffs
    for a in w.present:
        it = w.attempt(a)
        if it.to_decode:
            yield read_command, a, it.to_decode[0]
        for command in it.late:
            yield read_late, a, command
        if it.orphaned:
            yield notice_lost_session, a
        if it.lease:
            yield from _lease_moves(w, a, it)
        if it.claims and it.decode_end in (End.UP, End.BROKEN):
            yield read_message, a
        if it.decode_end == End.BROKEN:
            yield notice_broken_connection, a
        for frame in it.frames:
            yield read_frame, a, frame
        if handoffs.live[it.receive]:
            if handoffs.linked[it.receive] and peer_is_quiet(w, it):
                yield find_peer_silent, a, "silent"
                yield find_peer_silent, a, "no progress"
            if w.request(w.model.request_of(a)).expired:
                yield find_deadline, a
            if handoffs.holds[it.receive] and it.bitmap and w.may_strike("slow prefill"):
                yield give_up_slow_prefill, a
    if decode.claims:
        yield grant, decode.claims[0]
        if w.may_strike("refuse claim"):
            yield refuse_claim, decode.claims[0]


def _lease_moves(w: World, a: int, it: Attempt) -> Iterator[Move]:
    found = w.model.leases.all[it.lease]
    if found.phase in (lease.LeasePhase.PARKED, lease.LeasePhase.KEPT):
        yield let_lease_expire, a
    in_batch = str(a) in w.decode_blocks().jobs.waiting
    if found.phase is lease.LeasePhase.PARKED and in_batch and w.may_strike("evict"):
        yield evict_parked, a
    if it.evicted:
        yield notice_evicted, a
    if found.phase is lease.LeasePhase.OWNED and in_batch:
        yield run_row, a
    if found.live and w.request(w.model.request_of(a)).expired:
        yield end_at_deadline, a


def peer_is_quiet(w: World, it: Attempt) -> bool:
    return it.decode_end == End.BROKEN or w.prefill(it.prefill).frozen


# the router's commands


def read_command(w: World, a: int, command: Any) -> None:
    it = w.attempt(a)
    it.to_decode = it.to_decode[1:]
    _obey(w, a, command, True)


def read_late(w: World, a: int, command: Any) -> None:
    """Read a command from a stream that is over: the attempt that it starts or resumes is orphaned
    at once.
    """
    it = w.attempt(a)
    late = list(it.late)
    late.remove(command)
    it.late = tuple(late)
    _obey(w, a, command, False)


def _obey(w: World, a: int, command: Any, present: bool) -> None:
    """Run a command. `present`: the stream that it came on is up."""
    match command:
        case ("admit", epoch):
            _admit(w, a, epoch, present)
        case "cancel":
            _cancel(w, a, present)
        case ("resume", epoch):
            _resume(w, a, epoch, present)


def _admit(w: World, a: int, epoch: int, present: bool) -> None:
    """Implements DecodeCore.admit, Receiver.admit."""
    it = w.attempt(a)
    _belongs(it, epoch, present)
    promises = offer(w, len(w.model.config.prompts[w.model.request_of(a)]))
    if promises is None:
        emit(it, "busy")
        return
    w.decode.promised = promises.blocks
    it.receive = w.model.handoffs.receive
    it.lease = w.model.leases.owned(epoch)
    emit(it, "admitted")


def _belongs(it: Attempt, epoch: int, present: bool) -> None:
    it.alive = present
    if not present:
        it.orphaned = tuple(sorted({*it.orphaned, epoch}))


def _cancel(w: World, a: int, present: bool) -> None:
    """Implements DecodeCore.cancel: no event follows. Commands of a session that another one has
    replaced are ignored.
    """
    it = w.attempt(a)
    if not present and it.alive and w.model.leases.all[it.lease].phase is lease.LeasePhase.OWNED:
        return
    served = [x for x in w.present if w.model.live_lease(w.attempt(x).lease)]
    found = w.model.rules.named(served, a)
    if found is not None:
        _lease(w, found, lease.AttemptEnded())
        _stop(w, found)


def _resume(w: World, a: int, epoch: int, present: bool) -> None:
    """Implements DecodeCore.resume."""
    it = w.attempt(a)
    for action in _lease(w, a, lease.Resumed(epoch)):
        if action is lease.LeaseAction.HAND_OVER:
            _belongs(it, epoch, present)
            awaited = w.model.handoffs.live[it.receive]
            emit(it, ("resumed", epoch, awaited))
            if it.last:
                emit(it, it.last)
        elif action is lease.LeaseAction.SEND_GONE and present:
            it.from_decode += ("gone",)


def _stop(w: World, a: int) -> None:
    """Implements DecodePart.cancel: whatever the attempt's state, its blocks are free
    afterwards.
    """
    if w.model.handoffs.live[w.attempt(a).receive]:
        advance(w, a, "ended")
    else:
        w.do_decode("abort", a)


# the lease


def _lease(
    w: World, a: int, event: lease.Event, late: bool = False
) -> tuple[lease.LeaseAction, ...]:
    """Make one step of the lease; run its actions, those on blocks included."""
    it = w.attempt(a)
    it.lease, actions = w.model.leases.step(it.lease, event, late)
    for action in actions:
        if action is lease.LeaseAction.GIVE_UP:
            _stop(w, a)
        elif action is lease.LeaseAction.FORGET:
            it.last = ""
    return actions


def notice_lost_session(w: World, a: int) -> None:
    it = w.attempt(a)
    epoch, *rest = it.orphaned
    it.orphaned = tuple(rest)
    _lease(w, a, lease.SessionLost(epoch))


def let_lease_expire(w: World, a: int) -> None:
    _lease(w, a, lease.LeaseTick(), late=True)


def evict_parked(w: World, a: int) -> None:
    """The engine takes the blocks of a request that is parked in the batch, for other work."""
    w.strike("evict")
    w.do_decode("abort", a)
    w.attempt(a).evicted = True


def notice_evicted(w: World, a: int) -> None:
    """The loop learns of the eviction; a router may have sent a Resume in between."""
    it = w.attempt(a)
    it.evicted = False
    if lease.LeaseAction.SEND_GONE in _lease(w, a, lease.BlocksEvicted()):
        emit(it, "gone")


def end_at_deadline(w: World, a: int) -> None:
    """Implements DecodeCore._deadline."""
    say_last(w, a, "failed")
    _stop(w, a)


def say_last(w: World, a: int, word: str) -> None:
    """Send the one terminal event of an attempt."""
    it = w.attempt(a)
    if not w.model.live_lease(it.lease):
        return
    keep = word in ("finished", "failed")
    it.last = word if keep else ""
    _lease(w, a, lease.AttemptEnded(keep))
    emit(it, word)


def emit(it: Attempt, word: Any) -> None:
    if it.alive:
        it.from_decode += (word,)


# prefill's messages


def read_message(w: World, a: int) -> str:
    """Implements Receiver.message; for an attempt that is not live: Gone to a Claim, no answer to
    others.
    """
    it = w.attempt(a)
    word, it.claims = it.claims[0], it.claims[1:]
    match word:
        case "claim":
            advance(w, a, "claimed")
        case "computed":
            it.computed_heard = True
        case "abort":
            advance(w, a, "told")
    return str(word)


def notice_broken_connection(w: World, a: int) -> None:
    """Implements Endpoint._drop_link."""
    it = w.attempt(a)
    it.decode_end, it.claims = End.CLOSED, ()
    if w.model.handoffs.linked[it.receive]:
        advance(w, a, "disconnected")


def find_peer_silent(w: World, a: int, how: str) -> None:
    """Implements Endpoint._check: the machine's Tick, and the connection is abandoned."""
    advance(w, a, how)
    hang_up(w, a)


def hang_up(w: World, a: int) -> None:
    it = w.attempt(a)
    it.decode_end, it.claims = End.CLOSED, ()
    if it.prefill_end == End.UP:
        it.prefill_end = End.BROKEN


def give_up_slow_prefill(w: World, a: int) -> None:
    """Implements Receiver._check: no block has come for longer than its own pace allows."""
    w.strike("slow prefill")
    advance(w, a, "ended")


def find_deadline(w: World, a: int) -> None:
    advance(w, a, "deadline")


def grant(w: World, a: int) -> bool:
    """Implements granted of engine/handoff/incoming.py: the head of the line, or none. False: not
    yet.
    """
    granted: Granted | None = w.do_decode("reserve", a)
    if granted is None:
        return False
    w.decode.claims = w.decode.claims[1:]
    it = w.attempt(a)
    it.table, it.first, it.bitmap = granted.table, granted.first, 0
    copy_blocks(w, granted.copies)
    advance(w, a, "reserved")
    fill(w, a)
    return True


def refuse_claim(w: World, a: int) -> None:
    """Refuse a claim because the engine raises."""
    w.strike("refuse claim")
    w.decode.claims = w.decode.claims[1:]
    advance(w, a, "ended")


def advance(w: World, a: int, happening: str) -> None:
    """Implements Endpoint._advance."""
    it = w.attempt(a)
    it.receive, actions = w.model.handoffs.step(it.receive, happening)
    for action in actions:
        match action:
            case Action.QUEUE_CLAIM:
                w.decode.claims += (a,)
            case Action.GIVE_BACK_PROMISE:
                _give_back(w, a)
            case Action.FREE_BLOCKS:
                w.do_decode("release", a)
            case Action.COMMIT:
                _commit(w, a)
            case Action.SEND_GRANTED:
                post(it, ("granted", it.first))
            case Action.SEND_COMPLETE:
                post(it, "complete")
            case Action.SEND_ABORT:
                post(it, "abort")
            case Action.SEND_GONE:
                post(it, "gone")
            case Action.REPORT_LOST:
                say_last(w, a, "handoff lost")


def post(it: Attempt, message: Any) -> None:
    if it.decode_end == End.UP:
        it.grants += (message,)


def _give_back(w: World, a: int) -> None:
    prompt = w.model.config.prompts[w.model.request_of(a)]
    blocks = min(promise_blocks(len(prompt), 1, BLOCK_SIZE), w.model.config.blocks)
    promises = Promises(BLOCK_SIZE)
    promises.blocks = w.decode.promised
    try:
        promises.give_back(blocks)
    except ValueError as err:
        raise Violation(str(err)) from err
    w.decode.promised = promises.blocks


# frames


def read_frame(w: World, a: int, frame: Frame) -> None:
    """Implements Receiver.frame, payload and _write: verified on the connection's thread, written
    on the engine thread. A verified frame that waits is equivalent to one in flight: it may be
    written at any later moment, or its attempt ends before; so both are one move.
    """
    it = w.attempt(a)
    it.frames = without(it.frames, frame)
    if not w.model.rules.takes_frames(w.model.handoffs.all[it.receive]) or it.bitmap < 0:
        return
    index, value = frame
    if value == Values.TORN:
        post(it, ("nack", index))
        return
    bitmap = bitmap_of(w, a)
    try:
        piece = bitmap.piece(header(index))
    except FrameError as err:
        raise Violation(f"a genuine frame is refused: {err}") from err
    if bitmap.has(piece):
        return
    for block in piece.blocks:
        target = it.table[block]
        if not w.decode_blocks().may_write(a, target):
            owner = w.decode_blocks().owner(target)
            whose = w.model.title(owner) if owner is not None else "no attempt"
            raise Violation(f"a late frame is written into a block of {whose}")
        put(w, target, value)
    it.bitmap |= 1 << index
    fill(w, a)
    if w.model.handoffs.holds[it.receive] and bitmap_of(w, a).num_leading > bitmap.num_leading:
        tokens = bitmap_of(w, a).num_leading * BLOCK_SIZE
        w.do_decode("verified", a, tokens)  # Receiver._cache_verified


def fill(w: World, a: int) -> None:
    """Implements Receiver._commit_if_complete."""
    it = w.attempt(a)
    done = w.model.rules.is_complete(bitmap_of(w, a), it.computed_heard)
    if done and w.model.handoffs.holds[it.receive]:
        advance(w, a, "filled")


# the engine


def _commit(w: World, a: int) -> None:
    table = w.do_decode("commit", a)
    check_values(w, a, table, "joins the batch")


def run_row(w: World, a: int) -> bool:
    """Run the last prompt token as a decode row, which is also the last one. False: not yet."""
    table = w.decode_blocks().table(a)
    check_values(w, a, table, "runs")
    copies = w.do_decode("finish", a)
    if copies is None:
        return False
    copy_blocks(w, copies)
    say_last(w, a, "finished")
    return True


def thaw(w: World, _: int) -> None:
    w.decode.frozen = False
