"""Prefill: PrefillCore, Sender and the engine behind them, as one process with one move
at a time.
"""

from collections.abc import Iterator

from oracles.handoff_model.memory import Values
from oracles.handoff_model.router import Move
from oracles.handoff_model.rules import Violation
from oracles.handoff_model.state import Attempt, End, World
from pdserve.engine.handoff.protocol import Action, Phase

BLOCKS = 2  # of every prompt


def moves(w: World) -> Iterator[Move]:
    handoffs = w.model.handoffs
    for p in range(w.model.config.prefills):
        if w.prefill(p).frozen:
            yield thaw, p
    for a in w.present:
        it = w.attempt(a)
        if it.prefill < 0 or w.prefill(it.prefill).frozen:
            continue
        if it.to_prefill:
            yield read_command, a
        if it.prefill_end == End.DIALLING:
            yield from _dial_moves(w, a, it)
        if it.grants and it.prefill_end in (End.UP, End.BROKEN):
            yield read_message, a
        if not handoffs.live[it.send]:
            continue
        if it.prefill_end == End.BROKEN:
            yield notice_broken_connection, a
        if handoffs.linked[it.send]:
            if it.prefill_end == End.BROKEN or (it.prefill_end == End.UP and w.decode.frozen):
                yield find_peer_silent, a, "silent"
                yield find_peer_silent, a, "no progress"
        elif not w.prefill_blocks(it.prefill).tables:
            yield pick, a
        if w.request(w.model.request_of(a)).expired:
            yield find_deadline, a
        if handoffs.holds[it.send] and it.computed < BLOCKS:
            yield compute, a
        granted = handoffs.all[it.send].phase is Phase.RECEIVING
        if granted and 0 <= it.next < it.computed and it.prefill_end == End.UP:
            yield send_frame, a, it.next


def _dial_moves(w: World, a: int, it: Attempt) -> Iterator[Move]:
    unreachable = it.decode_gone or w.decode.frozen
    if not unreachable:
        yield connect, a
    if unreachable or w.may_strike("refuse dial"):
        yield fail_to_connect, a


def read_command(w: World, a: int) -> str:
    """Implements PrefillCore.start and cancel."""
    it = w.attempt(a)
    word, it.to_prefill = it.to_prefill[0], it.to_prefill[1:]
    if word == "start":
        it.known = not {"session lost", "died"} & set(it.from_prefill)
        if not it.send:
            it.send = w.model.handoffs.send
        elif w.model.handoffs.final[it.send]:  # its end is sent again
            done = w.model.handoffs.all[it.send].phase is Phase.COMMITTED
            report(it, "done" if done else "failed")
    elif it.send:
        it.known = False  # no event follows
        advance(w, a, "ended")
    return str(word)


def pick(w: World, a: int) -> None:
    """The engine allocates the blocks of the whole prompt: Scheduled."""
    it = w.attempt(a)
    if w.do_prefill(it.prefill, "pick", a) is None:
        raise Violation("an idle prefill worker lacks blocks")
    advance(w, a, "picked")


def connect(w: World, a: int) -> None:
    """Implements Sender._dialed: the connection is there, and the Claim is sent on it."""
    it = w.attempt(a)
    it.prefill_end = it.decode_end = End.UP
    if w.model.handoffs.final[it.send]:
        post(it, "abort")
        return
    post(it, "claim")
    if it.computed == BLOCKS and w.model.hears_computed:
        post(it, "computed")


def fail_to_connect(w: World, a: int) -> None:
    it = w.attempt(a)
    if not (it.decode_gone or w.decode.frozen):
        w.strike("refuse dial")
    it.prefill_end = End.CLOSED
    advance(w, a, "told")


def read_message(w: World, a: int) -> str:
    """Implements Sender.message."""
    it = w.attempt(a)
    message, it.grants = it.grants[0], it.grants[1:]
    match message:
        case ("granted", first):
            if it.next < 0:
                it.next = first
            advance(w, a, "granted")
        case ("nack", index):
            _send_again(w, a, index)
        case "complete":
            advance(w, a, "filled")
        case "abort" | "gone":
            advance(w, a, "told")
    return str(message)


def _send_again(w: World, a: int, index: int) -> None:
    """Implements Sender._refused, with one resend instead of two."""
    it = w.attempt(a)
    if not w.model.handoffs.holds[it.send]:
        return
    if it.resent:
        advance(w, a, "ended")
        return
    it.resent = True
    it.frames = tuple(sorted((*it.frames, (index, read(w, a, index)))))


def notice_broken_connection(w: World, a: int) -> None:
    it = w.attempt(a)
    it.prefill_end, it.grants = End.CLOSED, ()
    if w.model.handoffs.linked[it.send]:
        advance(w, a, "disconnected")


def find_peer_silent(w: World, a: int, how: str) -> None:
    advance(w, a, how)
    it = w.attempt(a)
    it.prefill_end, it.grants = End.CLOSED, ()
    if it.decode_end == End.UP:
        it.decode_end = End.BROKEN


def find_deadline(w: World, a: int) -> None:
    advance(w, a, "deadline")


def compute(w: World, a: int) -> None:
    """Compute a chunk of one block."""
    it = w.attempt(a)
    index, it.computed = it.computed, it.computed + 1
    prefill = w.prefill(it.prefill)
    values = list(prefill.values)
    values[table(w, a)[index] - 1] = expected(w, a, index)
    prefill.values = tuple(values)
    if it.computed == BLOCKS and w.model.hears_computed:
        post(it, "computed")


def send_frame(w: World, a: int, index: int) -> None:
    """Implements Outgoing._build, on the writer thread: read and signed at the last moment."""
    it = w.attempt(a)
    it.next += 1
    it.frames = tuple(sorted((*it.frames, (index, read(w, a, index)))))


def read(w: World, a: int, index: int) -> int:
    value = w.prefill(w.attempt(a).prefill).values[table(w, a)[index] - 1]
    if value != expected(w, a, index) or value == Values.TORN:
        raise Violation("a frame is signed over bytes of another owner")
    return value


def table(w: World, a: int) -> tuple[int, ...]:
    found: dict[int, tuple[int, ...]] = w.prefill_blocks(w.attempt(a).prefill).tables
    if a not in found:
        raise Violation("blocks are used after they were given back")
    return found[a]


def expected(w: World, a: int, index: int) -> int:
    return w.model.values.of_request[w.model.request_of(a)][index]


def advance(w: World, a: int, happening: str) -> None:
    """Implements Endpoint._advance."""
    it = w.attempt(a)
    it.send, actions = w.model.handoffs.step(it.send, happening)
    for action in actions:
        match action:
            case Action.SEND_CLAIM:
                it.prefill_end = End.DIALLING
            case Action.SEND_ABORT:
                post(it, "abort")
            case Action.FREE_BLOCKS:
                w.do_prefill(it.prefill, "release", a)
            case Action.REPORT_DONE:
                report(it, "done")
            case Action.REPORT_LOST:
                report(it, "failed")


def post(it: Attempt, message: str) -> None:
    if it.prefill_end == End.UP:
        it.claims += (message,)


def report(it: Attempt, word: str) -> None:
    if it.known:
        it.from_prefill += (word,)
    it.known = False


def thaw(w: World, p: int) -> None:
    w.prefill(p).frozen = False
