"""The router: services/router/requests/request.py as far as it orders the events of a hand-off.

What it is told of attempts that it has closed it ignores. After a lost session it asks for its
attempt again, or tries anew (another router would do either).
"""

from collections.abc import Iterator

from handoff_model.rules import Violation
from handoff_model.state import Attempt, Req, Stage, World
from pdserve.engine.handoff.protocol.promises import Promises, promise_blocks

Move = tuple[object, ...]  # a function of a World and its further arguments


def moves(w: World) -> Iterator[Move]:
    for r, prompt in enumerate(w.model.config.prompts):
        req = w.request(r)
        if req.stage == Stage.NEW and (r == 0 or w.request(r - 1).stage != Stage.NEW):
            yield submit, r
        # Nothing is begun at a decode that is frozen: it may as well freeze right after it.
        may_begin = not req.expired and not w.decode.frozen
        if req.stage == Stage.QUEUED and may_begin and (not req.busy or has_room(w, len(prompt))):
            for p in candidates(w, r):
                yield begin, r, p
        if req.expired and req.stage not in (Stage.NEW, Stage.ENDED):
            yield end_at_deadline, r
        a = req.current
        if a < 0:
            continue
        attempt = w.attempt(a)
        if w.decode.frozen and "died" not in attempt.from_decode and not attempt.decode_gone:
            yield declare_decode_dead, a, False
            if attempt.to_decode:
                yield declare_decode_dead, a, True
        frozen = w.prefill(attempt.prefill).frozen and not attempt.prefill_gone
        if frozen and req.stage == Stage.PREFILLING and "died" not in attempt.from_prefill:
            yield declare_prefill_dead, a, False
            if attempt.to_prefill:
                yield declare_prefill_dead, a, True
        if attempt.from_decode:
            if attempt.from_decode[0] == "session lost" and req.stage == Stage.PREFILLING:
                yield resume, a
            yield hear_decode, a
        if attempt.from_prefill:
            if attempt.from_prefill[0] == "session lost" and req.stage == Stage.PREFILLING:
                yield start_again, a
            yield hear_prefill, a


def has_room(w: World, num_tokens: int) -> bool:
    """As its next load report shows."""
    return offer(w, num_tokens) is not None


def offer(w: World, num_tokens: int) -> Promises | None:
    """Decode's promises if it takes one more prompt; None: Busy. As in Receiver.admit."""
    pool = w.decode_blocks().pool
    counts = pool.counts()
    promises = Promises(2)
    promises.blocks = w.decode.promised
    blocks = min(promise_blocks(num_tokens, 1, 2), counts.total)
    running = len(w.decode_blocks().jobs.waiting)
    return promises if promises.offer(blocks, counts.free + counts.cached, running) else None


def candidates(w: World, r: int) -> list[int]:
    """Prefill workers to choose from; they are alike, so the very first choice is the first."""
    req = w.request(r)
    everyone = range(w.model.config.prefills)
    if r == 0 and not req.begun:
        return [0]
    return [p for p in everyone if not req.failed >> p & 1] or list(everyone)


def submit(w: World, r: int) -> None:
    w.request(r).stage = Stage.QUEUED


def begin(w: World, r: int, p: int) -> None:
    req = w.request(r)
    a = r * w.model.config.attempts + req.begun
    req.begun += 1
    req.current, req.stage, req.busy = a, Stage.ADMITTING, False
    req.prefill_done = req.decode_over = req.prefill_over = False
    attempt = w.attempt(a)
    attempt.prefill = p
    to_decode(attempt, "admit")


def declare_decode_dead(w: World, a: int, read_late: bool) -> None:
    """A process that is silent; its session is closed. It may thaw, and go on."""
    lose_decode(w, a, "died", read_late)


def lose_decode(w: World, a: int, why: str, read_late: bool) -> None:
    """The session to decode is over; `read_late`: what was said last is in decode's buffers."""
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
    """Likewise; prefill does not react to it."""
    attempt = w.attempt(a)
    if not read_late:
        attempt.to_prefill = ()
    attempt.from_prefill, attempt.known = (why,), False


def hear_decode(w: World, a: int) -> str:
    """services/router/requests/worker_events.py of_decode, Flow.worker_lost."""
    attempt, req = w.attempt(a), w.request(w.model.request_of(a))
    word, attempt.from_decode = attempt.from_decode[0], attempt.from_decode[1:]
    match word:
        case "admitted" if req.stage == Stage.ADMITTING:
            req.stage = Stage.PREFILLING
            to_prefill(attempt, "start")
        case "busy" if req.stage == Stage.ADMITTING:
            tries = w.model.config.tries(w.model.request_of(a))
            close(w, req)
            if not (attempt.late or attempt.orphaned):
                req.begun -= 1  # nothing was tried; its id is as good as a new one
            req.busy = True
            if req.begun == tries:
                answer(req, "failed")
                req.stage = Stage.ENDED
        case "handoff lost":
            req.decode_over = True
            prefill_lost(w, req)
        case "finished":
            answer(req, "ok")
            close(w, req)
            req.stage = Stage.ENDED
        case "failed":
            req.decode_over = True
            fail(w, req)
        case "gone":
            req.decode_over = True
            retry(w, req)
        case "session lost" | "died":
            req.decode_over = True  # a Cancel would not arrive
            retry(w, req)
    return str(word)


def resume(w: World, a: int) -> None:
    """The session is lost: ask for the attempt on a new one, under a higher epoch."""
    attempt, req = w.attempt(a), w.request(w.model.request_of(a))
    attempt.from_decode = attempt.from_decode[1:]
    req.epoch += 1
    to_decode(attempt, ("resume", req.epoch))


def start_again(w: World, a: int) -> None:
    """The session with prefill is lost: say PrefillStart on a new one (adoption.seek_prefill)."""
    attempt = w.attempt(a)
    attempt.from_prefill = attempt.from_prefill[1:]
    to_prefill(attempt, "start")


def hear_prefill(w: World, a: int) -> str:
    """services/router/requests/worker_events.py of_prefill, Flow.worker_lost."""
    attempt, req = w.attempt(a), w.request(w.model.request_of(a))
    word, attempt.from_prefill = attempt.from_prefill[0], attempt.from_prefill[1:]
    match word:
        case "done":
            req.prefill_done = req.prefill_over = True
        case "failed":
            req.prefill_over = True
            prefill_lost(w, req)
        case "session lost" | "died":
            req.prefill_over = True  # a Cancel would not arrive
            prefill_lost(w, req)
    return str(word)


def end_at_deadline(w: World, r: int) -> None:
    fail(w, w.request(r))


def prefill_lost(w: World, req: Req) -> None:
    if not req.prefill_done:
        req.failed |= 1 << w.attempt(req.current).prefill
        retry(w, req)


def retry(w: World, req: Req) -> None:
    tries = w.model.config.tries(w.model.request_of(req.current))
    cancel_attempt(w, req)
    close(w, req)
    if req.begun == tries:
        answer(req, "failed")
        req.stage = Stage.ENDED


def fail(w: World, req: Req) -> None:
    """The client is told an error."""
    cancel_attempt(w, req)
    answer(req, "failed")
    close(w, req)
    req.stage = Stage.ENDED


def answer(req: Req, what: str) -> None:
    if req.answer:
        raise Violation(f"the client was told {req.answer!r} and now {what!r}")
    req.answer = what


def close(w: World, req: Req) -> None:
    if req.current >= 0:
        w.attempt(req.current)  # its record forgets what only the router would have heard
    req.current, req.stage = -1, Stage.QUEUED
    req.prefill_done = req.decode_over = req.prefill_over = False


def cancel_attempt(w: World, req: Req) -> None:
    """Cancel on the sides that may still have it."""
    if req.current < 0:
        return
    attempt = w.attempt(req.current)
    if not req.decode_over:
        to_decode(attempt, "cancel")
    if req.stage != Stage.ADMITTING and not req.prefill_over:
        to_prefill(attempt, "cancel")


def to_decode(attempt: Attempt, message: object) -> None:
    """Dropped if the session is down, or the process is another one now."""
    down = "session lost" in attempt.from_decode or attempt.decode_gone
    if not down:
        attempt.to_decode += (message,)


def to_prefill(attempt: Attempt, message: object) -> None:
    down = "session lost" in attempt.from_prefill or attempt.prefill_gone
    if not down:
        attempt.to_prefill += (message,)
