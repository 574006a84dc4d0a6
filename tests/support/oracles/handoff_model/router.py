"""The router: services/router/request/machine.py itself, and the code that carries messages to
and from it.

No rule of the router is here, only its surroundings: which event may reach it when, and where its
commands go. An attempt whose session is lost may be found again or not (another router would do
either), so for a request that seeks a worker both are tried.
"""

from collections.abc import Iterator
from typing import Any

from oracles.handoff_model.machines import DECODE, FAILED, prefill_incarnation
from oracles.handoff_model.rules import Violation
from oracles.handoff_model.state import Attempt, Req, World
from pdserve.engine.handoff.incoming import Promises, promise_blocks
from pdserve.services.router.request import Reachability
from pdserve.services.router.request import actions as do
from pdserve.services.router.request import events as on
from pdserve.services.router.request.state import Stage

Move = tuple[object, ...]  # a function of a World and its further arguments
LOSSES = ("session lost", "died")  # reported to a request at a session's end


def moves(w: World) -> Iterator[Move]:
    for r, prompt in enumerate(w.model.config.prompts):
        req = w.request(r)
        if not req.submitted:
            if r == 0 or w.request(r - 1).submitted:
                yield submit, r
            continue
        stage = w.stage(r)
        if stage is Stage.QUEUED:
            # Nothing begins at a frozen decode: a freeze right after the beginning covers it.
            may_begin = not req.expired and not w.decode.frozen
            no_more = req.begun == w.model.config.tries(r)
            if req.busy or no_more:
                yield time_out_in_queue, r
            if not no_more and may_begin and (not req.busy or has_room(w, len(prompt))):
                for p in candidates(w, r):
                    yield begin, r, p
        if req.expired and stage is not Stage.ENDED:
            yield end_at_deadline, r
        for k in range(req.begun):
            a = r * w.model.config.attempts + k
            it = w.attempt(a)
            if it.from_decode:
                yield hear_decode, a
            if it.from_prefill:
                yield hear_prefill, a
            if w.is_current(a):
                yield from _moves_of_current(w, a, it, stage)


def _moves_of_current(w: World, a: int, it: Attempt, stage: Stage) -> Iterator[Move]:
    if w.decode.frozen and "died" not in it.from_decode and not it.decode_gone:
        yield declare_decode_dead, a, False
        if it.to_decode:
            yield declare_decode_dead, a, True
    frozen = w.prefill(it.prefill).frozen and not it.prefill_gone
    if frozen and stage is Stage.PREFILLING and "died" not in it.from_prefill:
        yield declare_prefill_dead, a, False
        if it.to_prefill:
            yield declare_prefill_dead, a, True
    if stage is Stage.SEEKING:
        yield seek_decode, a, Reachability.NO
        if not it.decode_gone:
            yield seek_decode, a, Reachability.YES
    attempt = routing(w, a).attempt
    if stage is Stage.PREFILLING and attempt is not None and attempt.unheard:
        yield seek_prefill, a, Reachability.NO
        if not it.prefill_gone:
            yield seek_prefill, a, Reachability.YES


def routing(w: World, a: int) -> Any:
    """Return the state of the attempt's request in the router."""
    return w.model.routings.all[w.request(w.model.request_of(a)).machine]


def has_room(w: World, num_tokens: int) -> bool:
    """Return whether decode has room, as its next load report shows."""
    return offer(w, num_tokens) is not None


def offer(w: World, num_tokens: int) -> Promises | None:
    """Return decode's promises if it takes one more prompt; None: Busy. As in Receiver.admit."""
    pool = w.decode_blocks().pool
    counts = pool.counts()
    promises = Promises(2)
    promises.blocks = w.decode.promised
    blocks = min(promise_blocks(num_tokens, 1, 2), counts.total)
    running = len(w.decode_blocks().jobs.waiting)
    return promises if promises.offer(blocks, counts.free + counts.cached, running) else None


def candidates(w: World, r: int) -> list[int]:
    """Return prefill workers that the policy may choose. They are alike: the very first is the
    first.
    """
    req = w.request(r)
    everyone = range(w.model.config.prefills)
    if r == 0 and not req.begun:
        return [0]
    failed = w.model.routings.all[req.machine].failed_prefills
    return [p for p in everyone if prefill_incarnation(p) not in failed] or list(everyone)


# events


def submit(w: World, r: int) -> None:
    w.request(r).submitted = True
    tell(w, r, on.Submitted())


def begin(w: World, r: int, p: int) -> None:
    req = w.request(r)
    a = r * w.model.config.attempts + req.begun
    number = bytes([req.begun])
    req.begun += 1
    req.busy = False
    w.attempt(a).prefill = p
    tell(w, r, on.AttemptBegun(number, DECODE, prefill_incarnation(p)))


def time_out_in_queue(w: World, r: int) -> None:
    """Decode has been full for too long, or the model has no remaining name for another attempt."""
    req = w.request(r)
    take(w, r, *w.model.routings.passes_queue_deadline(req.machine))


def end_at_deadline(w: World, r: int) -> None:
    req = w.request(r)
    take(w, r, *w.model.routings.passes_deadline(req.machine))


def declare_decode_dead(w: World, a: int, read_late: bool) -> None:
    """A silent process is declared dead and its session closed. It may thaw, and continue."""
    lose_decode(w, a, "died", read_late)


def lose_decode(w: World, a: int, why: str, read_late: bool) -> None:
    """The session to decode is over; `read_late`: the last messages are in decode's buffers."""
    attempt = w.attempt(a)
    if read_late:
        attempt.late = tuple(sorted((*attempt.late, *attempt.to_decode), key=str))
    attempt.to_decode, attempt.from_decode = (), (why,)
    if attempt.alive:
        attempt.alive = False
        if attempt.lease:
            epoch = w.model.leases.all[attempt.lease].epoch
            attempt.orphaned = tuple(sorted({*attempt.orphaned, epoch}))


def declare_prefill_dead(w: World, a: int, read_late: bool) -> None:
    lose_prefill(w, a, "died", read_late)


def lose_prefill(w: World, a: int, why: str, read_late: bool) -> None:
    """The session to prefill is over; prefill does not react to it."""
    attempt = w.attempt(a)
    if not read_late:
        attempt.to_prefill = ()
    attempt.from_prefill, attempt.known = (why,), False


def seek_decode(w: World, a: int, found: Reachability) -> None:
    tell(w, w.model.request_of(a), on.TimePassed(decode=found))


def seek_prefill(w: World, a: int, found: Reachability) -> None:
    tell(w, w.model.request_of(a), on.TimePassed(prefill=found))


def hear_decode(w: World, a: int) -> str:
    """A message of decode, or the end of its session, reaches the router."""
    it, r = w.attempt(a), w.model.request_of(a)
    word, it.from_decode = it.from_decode[0], it.from_decode[1:]
    number, current = bytes([a % w.model.config.attempts]), w.is_current(a)
    match word:
        case "session lost" | "died":
            if current:
                lost = on.WorkerLost(DECODE, word, crashed=word == "died", forgotten=False)
                tell(w, r, lost, closed=DECODE if word == "died" else b"")
        case "admitted":
            tell(w, r, on.AdmitAccepted(number, ticket=True))
        case "busy":
            if current:
                _was_refused(w.request(r), it)
            tell(w, r, on.AdmitRefused(number))
        case "handoff lost":
            tell(w, r, on.KvLost(number, word))
        case "finished":
            tell(w, r, on.AttemptFinished(number))
        case "failed":
            tell(w, r, on.AttemptFailed(number, FAILED))
        case "gone":
            tell(w, r, on.AttemptUnknown(number))
        case ("resumed", epoch, ticket):
            prefill = prefill_incarnation(it.prefill)
            tell(w, r, on.ResumeAccepted(number, epoch, ticket, prefill, Reachability.YES))
    return str(word)


def _was_refused(req: Req, it: Attempt) -> None:
    """Undo a try that was refused: its name is free again, unless decode may still receive it."""
    req.busy = True
    if it.late or it.orphaned:
        req.refused += 1
    else:
        req.begun -= 1


def hear_prefill(w: World, a: int) -> str:
    it, r = w.attempt(a), w.model.request_of(a)
    word, it.from_prefill = it.from_prefill[0], it.from_prefill[1:]
    number = bytes([a % w.model.config.attempts])
    match word:
        case "session lost" | "died":
            if w.is_current(a):
                incarnation = prefill_incarnation(it.prefill)
                lost = on.WorkerLost(incarnation, word, crashed=word == "died", forgotten=False)
                tell(w, r, lost, closed=incarnation if word == "died" else b"")
        case "done":
            tell(w, r, on.PrefillSent(number))
        case "failed":
            tell(w, r, on.PrefillEnded(number, word))
    return str(word)


# actions


def tell(w: World, r: int, event: on.RoutingEvent, closed: bytes = b"") -> None:
    """Pass an event to the machine of request r; `closed`: a worker to which no session is up."""
    machine, actions = w.model.routings.step(w.request(r).machine, event)
    take(w, r, machine, actions, closed)


def take(
    w: World, r: int, machine: int, actions: tuple[do.RoutingAction, ...], closed: bytes = b""
) -> None:
    """Carry out the actions of the machine."""
    req = w.request(r)
    req.machine = machine
    for action in actions:
        match action:
            case do.Place():
                _queue(w, r)
            case do.SendFinished():
                answer(req, "ok")
            case do.SendFailed():
                answer(req, "failed")
            case do.SendAdmit():
                epoch = w.model.routings.all[machine].session_epoch
                to_decode(w, r, action.attempt, ("admit", epoch), closed)
            case do.SendResume():
                epoch = w.model.routings.all[machine].session_epoch
                to_decode(w, r, action.attempt, ("resume", epoch), closed)
            case do.CancelAtDecode():
                to_decode(w, r, action.attempt, "cancel", closed)
            case do.SendPrefillStart():
                to_prefill(w, r, action.attempt, "start", closed)
            case do.CancelAtPrefill():
                to_prefill(w, r, action.attempt, "cancel", closed)
            case do.CloseAttempt():
                attempt_of(w, r, action.attempt)  # its record drops messages that would be ignored


def _queue(w: World, r: int) -> None:
    """Queue the request; `begin` is the policy's answer."""
    req, tries = w.request(r), w.model.config.tries(r)
    if req.begun == tries and not req.refused:
        raise Violation(f"request {r} is to be tried more than {tries} times")
    req.machine, actions = w.model.routings.step(req.machine, on.Queued())
    assert not actions


def answer(req: Req, what: str) -> None:
    if req.answer:
        raise Violation(f"the client got {req.answer!r} and now gets {what!r}")
    req.answer = what


def attempt_of(w: World, r: int, number: bytes) -> Attempt:
    return w.attempt(r * w.model.config.attempts + number[0])


def _is_down(heard: tuple[object, ...]) -> bool:
    """Return whether the router has closed or lost the session, though the machine has yet to
    learn it.
    """
    return any(loss in heard for loss in LOSSES)


def to_decode(w: World, r: int, number: bytes, message: object, closed: bytes) -> None:
    """Send a message to decode; dropped if the session is down, or the process is another
    one now.
    """
    it = attempt_of(w, r, number)
    if not _is_down(it.from_decode) and not it.decode_gone and closed != DECODE:
        it.to_decode += (message,)


def to_prefill(w: World, r: int, number: bytes, message: object, closed: bytes) -> None:
    it = attempt_of(w, r, number)
    down = _is_down(it.from_prefill) or it.prefill_gone
    if not down and closed != prefill_incarnation(it.prefill):
        it.to_prefill += (message,)
