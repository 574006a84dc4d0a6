"""One request in the router: carries out the actions of its state machine (machine.py).

RoutedRequest holds what the state machine does not need: the token ids (RequestProgress), workers,
tickets, and the facts that the client receives at the end. It is synchronous, and time is an
argument. Its `Effects` are its only access to the rest of the router, so that the same code runs on
sockets and under a test's clock.
"""

import logging
import os
from typing import Any

from pdserve.engine.kv import KvIdentity
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.router_pb2 import Placed, RequestEvent
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import (
    LostTokens,
    NumberedChoice,
    RequestProgress,
    remaining_ms,
    send_ids,
)
from pdserve.services.common.tracing import NO_SPAN, TraceSpan
from pdserve.services.router.fleet import Worker
from pdserve.services.router.placement import EMBEDDING, PromptFacts, WorkerPool
from pdserve.services.router.request import actions as do
from pdserve.services.router.request import events as on
from pdserve.services.router.request import machine
from pdserve.services.router.request.actions import FailureReason
from pdserve.services.router.request.effects import Assignment, Client, Effects
from pdserve.services.router.request.state import (
    Attempt,
    Beginning,
    FirstToken,
    MigrationStep,
    Routing,
    Transition,
)

log = logging.getLogger(__name__)

OUTPUT = ("tokens", "prompt_logprobs", "embedding", "finished")
ROUTER_ERRORS: dict[FailureReason, ServiceError] = {
    FailureReason.CANCELLED: ServiceError(pb.CANCELLED, "the client cancelled the request"),
    FailureReason.CLIENT_GONE: ServiceError(
        pb.CANCELLED, "the gateway that sent the request has disconnected"
    ),
    FailureReason.DEADLINE: ServiceError(
        pb.DEADLINE_EXCEEDED, "the request ran longer than its timeout"
    ),
    FailureReason.QUEUE_TIMEOUT: ServiceError(
        pb.QUEUE_TIMEOUT, "no worker took the request in time", "", 1.0
    ),
    FailureReason.POISON: ServiceError(
        pb.POISON_REQUEST, "the request was running on two workers that died"
    ),
    FailureReason.NO_ATTEMPT_LEFT: ServiceError(pb.INTERNAL, "every attempt at the request failed"),
    FailureReason.NO_WORKER_HERE: ServiceError(
        pb.UNAVAILABLE,
        "no worker that can take the request is registered with this router",
        "",
        1.0,
    ),
}


class RoutedRequest:
    """One request of one client in the router, and its attempts on workers."""

    def __init__(
        self,
        effects: Effects["RoutedRequest"],
        progress: RequestProgress,
        client: Client,
        ordinal: int,
        now: float,
        span: TraceSpan = NO_SPAN,
    ) -> None:
        start = progress.start
        if span.recorded:  # otherwise workers' spans are children of the gateway's
            start.trace_parent = span.context.parent
            span.set(pdserve__request=start.request, gen_ai__request__model=start.model)
        queue_s = start.queue_remaining_ms / 1000
        self.progress = progress
        self.client = client
        self.ordinal = ordinal  # order of arrival, kept over retries
        self.span = span
        self.id = start.request
        self.model = start.model
        # A gateway of release 0.1 does not name the pooling.
        pooling = (start.pooling or EMBEDDING) if start.pool else ""
        self.pool = WorkerPool(start.model, start.tokenizer, pooling)
        self.tenant = start.tenant
        self.state = Routing(
            epoch=start.epoch,
            deadline=now + start.remaining_ms / 1000 if start.remaining_ms else None,
            queue_s=queue_s,
            queue_deadline=now + queue_s if queue_s else None,
            crash_count=start.crash_count,
            begun=progress.begun,
            complete=progress.complete,
            placed_attempt=start.placement.attempt,
            placed_decode=start.placement.decode_incarnation,
            seek_start=now,
        )
        self.verified: dict[bytes, int] = {}  # tokens that decode workers keep, by incarnation
        self.beginning = Beginning(FirstToken(now))
        self.inexact = False  # it was resumed on another KV identity
        self.origin: KvIdentity | None = None  # of the worker whose output it passed on; binds it
        if progress.begun and start.placement.HasField("identity"):
            self.origin = KvIdentity.of(start.placement.identity)
        self.placement = pb.Placement()  # of the attempt that it has or is to adopt
        self.placement.CopyFrom(start.placement)
        self._effects = effects
        self.arrived = now
        self._counted = False  # its prompt has been counted as local or remote
        self._assignments: dict[bytes, Assignment] = {}  # of its attempt and of a migration's
        self._rows_of: Assignment | None = None  # the attempt whose rows are only passed on
        self._quiet_until = 0.0  # TimePassed changes nothing before this time
        self._target: Worker | None = None  # of a migration
        self._so_far = pb.Finished()  # a migration source's report of the beginning

    @property
    def key(self) -> tuple[bytes, str]:
        """Key of the request (client key and request id), the same each time that its client issues
        it."""
        return self.client.key, self.id

    @property
    def given_back(self) -> bool:
        """Whether another router has returned the request to its client because it had no worker
        for it."""
        return bool(self.progress.start.given_back)

    @property
    def rank(self) -> tuple[int, int]:
        """Priority and arrival number of the request; of a tenant's waiting requests, the one with
        the lowest comes first."""
        return self.progress.start.priority, self.ordinal

    @property
    def assignment(self) -> Assignment | None:
        """The workers and ids of the current attempt, or None without an attempt."""
        attempt = self.state.attempt
        return None if attempt is None else self._assignments[attempt.id]

    def assignment_of(self, attempt: bytes) -> Assignment | None:
        """Return the workers and ids of an open attempt, either the current one or the one at a
        migration's target; None for any other attempt."""
        return self._assignments.get(attempt)

    def facts(self) -> PromptFacts:
        """Return the facts about the request that the placement policy decides by."""
        return PromptFacts(
            num_tokens=len(self.progress.prefix_ids()) - 1,
            may_go_remote=self.progress.may_go_remote,
            prefill_failures=self.state.num_prefill_failures,
            failed_prefills=self.state.failed_prefills,
        )

    def step(self, event: on.RoutingEvent, now: float, message: Any = None) -> None:
        """Apply an event to the state machine and carry out the resulting actions. `message`: the
        data that came with the event, if any."""
        for action in self._stepped(event, now):
            self._carry_out(action, message, now)
        passes_on = self.state.only_forwards
        self._rows_of = self.assignment if passes_on else None
        self._quiet_until = self.state.quiet_until if passes_on else 0.0

    # --- called by the dispatcher

    def submit(self, now: float) -> None:
        """Begin the request: resume the attempt that its Start names, or place the request on
        workers."""
        has_placement = self.progress.start.HasField("placement")
        reach = (
            self._effects.reach(self.placement.decode_incarnation, now) if has_placement else None
        )
        self.step(on.Submitted(reach), now)

    def begin(
        self, decode: Worker, prefill: Worker | None, follows: bool, min_shared: int, now: float
    ) -> bytes:
        """Begin an attempt on the workers that the placement policy chose. Returns the attempt's
        id."""
        id_ = os.urandom(16)
        ids = self.progress.prefix_ids()[:-1]
        self._assignments[id_] = Assignment(id_, decode, prefill, ids, now)
        incarnation = b"" if prefill is None else prefill.incarnation
        self.step(on.AttemptBegun(id_, decode.incarnation, incarnation, follows, min_shared), now)
        return id_

    def migrate(self, target: Worker, now: float) -> None:
        """Begin to migrate the request with its KV to the decode worker `target`."""
        self._target = target
        self.step(on.MigrationBegun(target.incarnation), now)

    def cancel(self, choices: tuple[int, ...], now: float) -> None:
        """Cancel the whole request if `choices` is empty, so that it fails with CANCELLED;
        otherwise end only those choices and continue the others."""
        if not choices:
            self.step(on.RequestCancelled(), now)
            return
        self.progress.abort(choices)
        self.step(on.ChoicesCancelled(choices, self.progress.complete), now)

    def tick(self, now: float) -> None:
        """Let time pass: apply the request's deadlines, and retry what waits for a worker."""
        if now < self._quiet_until:
            return
        attempt = self.state.attempt
        prefill = b"" if attempt is None else attempt.sending_prefill
        decode = self._effects.reach(self.state.placed_decode, now)
        self.step(on.TimePassed(decode, self._effects.reach(prefill, now)), now)

    def succeed(self, predecessor: "RoutedRequest", attempt: Attempt, now: float) -> None:
        """Take over the attempt of `predecessor`, an earlier issue of this request, while decode
        has yet to answer the attempt's Admit."""
        self._assignments[attempt.id] = predecessor._assignments.pop(attempt.id)
        self._enter(machine.taken_over(self.state, attempt), now)

    def reissue(self, progress: RequestProgress, now: float) -> Attempt | None:
        """End this issue of the request without an event, because the client issued the request
        again. `progress`: the new issue. Returns the attempt that the new issue must take over with
        `succeed`, or None if no attempt continues or the new issue finds it by the placement, which
        is added to its Start."""
        start, attempt = progress.start, self.state.attempt
        start.crash_count = max(start.crash_count, self.state.crash_count)
        same_progress = progress.choices == self.progress.choices
        actions = self._stepped(on.Reissued(same_progress), now)
        self._rows_of, self._quiet_until = None, 0.0
        self.span.event("issued again", now)
        self.span.end()
        for action in actions:
            if isinstance(action, do.HandOver | do.LeaveToSuccessor):
                start.placement.CopyFrom(self.placement)
            self._carry_out(action, None, now)
        handed_over = any(isinstance(action, do.HandOver) for action in actions)
        return attempt if handed_over else None

    # --- messages from workers

    def on_decode(self, kind: str, message: Any, now: float) -> None:
        """Process a decode worker's event about an attempt of the request. `kind`: name of the
        event's field in the proto."""
        attempt = message.attempt
        if kind in OUTPUT and not self._counted:
            self._counted = True
            self._effects.count_prefill(self._assignments[attempt].prefill is not None)
        match kind:
            case "verified":
                self._verified(message)
            case "tokens" | "prompt_logprobs":
                self._output(kind, message, now)
            case "embedding":
                self._embedding(message, now)
            case "resumed":
                self._resumed(message, now)
            case "held":
                self._held(message, now)
            case _:
                if kind == "admitted":
                    self._ticket(message)
                elif kind == "place_again":
                    text = "the decode worker returned the request for a new placement: %s"
                    log.debug(text, message.reason, extra={"request": self.id})
                    self.span.event("placed again", now, reason=message.reason)
                    self._keeps(message)
                self.step(on.of_decode(kind, message), now, message)

    def pass_on_row(self, worker: Worker, choice: NumberedChoice, position: int, id_: int) -> bool:
        """Forward a token of an unfinished choice, which a decode worker sent as a row, to the
        client as a row. Returns False if the token may change the request's state, so that
        `on_token` must process it."""
        assignment = self._rows_of
        if assignment is None or assignment.decode is not worker:
            return False
        client_choice = assignment.clients_choices.get(choice)
        if client_choice is None and (
            assignment.id != choice.attempt or not self.client.reads_rows
        ):
            return False
        if not self.progress.take_next(choice.choice, position, id_):
            return False
        if client_choice is None:
            client_choice = NumberedChoice(self.id, choice.attempt, self.state.epoch, choice.choice)
            assignment.clients_choices[choice] = client_choice
        self.client.put_token(client_choice, position, id_)
        return True

    def on_token(self, choice: NumberedChoice, position: int, id_: int, now: float) -> None:
        """Process a token that a decode worker sent as a row and that `pass_on_row` did not
        forward."""
        tokens = pb.Tokens(
            attempt=choice.attempt, choice=choice.choice, position=position, ids=(id_,)
        )
        self.on_decode("tokens", tokens, now)

    def on_prefill(self, kind: str, message: Any, now: float) -> None:
        """Process a prefill worker's event about an attempt of the request. `kind`: name of the
        event's field in the proto."""
        self.step(on.of_prefill(kind, message), now)

    def _output(self, kind: str, message: Any, now: float) -> None:
        """Process token ids or prompt log-probabilities of a decode worker. Only those that
        continue the response are passed on; repeated ones are ignored."""
        attempt = message.attempt
        if not self.state.takes_output(attempt):
            return
        tokens = kind == "tokens"
        try:
            fresh = self.progress.take(message) if tokens else self.progress.take_scores(message)
        except LostTokens as error:
            self.step(on.OutputMissing(attempt, str(error), tokens), now)
            return
        if tokens:
            facts = self.progress.begun, self.progress.complete
            self.step(on.TokensReceived(attempt, *facts), now, fresh)
        else:
            self.step(on.ScoresReceived(attempt), now, fresh)

    def _embedding(self, message: pb.Embedding, now: float) -> None:
        """Process the embedding that a decode worker sent; a second one is ignored."""
        if not self.state.takes_output(message.attempt):
            return
        fresh = self.progress.take_embedding(message)
        if fresh is not None:
            self.step(on.EmbeddingReceived(message.attempt), now, fresh)

    def _verified(self, message: wire.Verified) -> None:
        """Record how many tokens the decode worker has verified, which it keeps in its cache
        whatever happens to the attempt, and how many were cached before."""
        if self._keeps(message) and self.beginning.hit is None:
            self.beginning.hit = message.cached_tokens

    def _keeps(self, message: wire.Verified | wire.PlaceAgain) -> bool:
        """Record how many tokens of the request the decode worker keeps in its cache. Returns
        False, and records nothing, if the message is not about the current attempt."""
        attempt = self.state.attempt
        if attempt is None or attempt.id != message.attempt:
            return False
        verified = self.verified.get(attempt.decode, 0)
        self.verified[attempt.decode] = max(verified, message.tokens)
        return True

    def _ticket(self, message: wire.Admitted | wire.Resumed) -> None:
        assignment = self._assignments.get(message.attempt)
        if assignment is not None and message.HasField("ticket"):
            assignment.ticket = message.ticket

    def _resumed(self, message: wire.Resumed, now: float) -> None:
        attempt = self.state.attempt
        prefill = b"" if attempt is None else attempt.prefill
        if attempt is not None and attempt.adopted:
            prefill = prefill or message.prefill_incarnation
        event = on.ResumeAccepted(
            message.attempt,
            message.epoch,
            message.HasField("ticket"),
            message.prefill_incarnation,
            self._effects.reach(prefill, now),
            message.follows,
        )
        self.step(event, now, message)

    def _held(self, message: wire.Held, now: float) -> None:
        migration = self.state.migration
        if migration is None or migration.step is not MigrationStep.HOLDING:
            return
        self._so_far = message.so_far
        complete = message.tokens == len(self.progress.prefix_ids()) - 1
        target = os.urandom(16) if complete else b""
        self.step(on.SourceHeld(message.attempt, complete, target), now)

    # --- steps of the machine and their actions

    def _stepped(self, event: on.RoutingEvent, now: float) -> tuple[do.RoutingAction, ...]:
        """Apply an event to the state machine and store the next state. Returns the actions, which
        the caller must carry out."""
        state, actions = machine.step(self.state, event, now)
        self._enter(state, now)
        return actions

    def _enter(self, state: Routing, now: float) -> None:
        """Store the next state of the request, and record what it changes in counters and the
        trace."""
        before, self.state = self.state, state
        if state is before:
            return
        transition = Transition(before, state)
        self._effects.stepped(self, transition, now)
        if transition.migration_begun:
            self.span.event("migration begun", now)
        elif transition.migrated:
            assert before.attempt is not None  # at the source
            self.beginning.migrated(self._so_far, state.num_attempts, before.attempt.id)
            num_tokens = len(self._assignments[transition.migrated].ids)
            self.span.event("migration done", now, tokens=num_tokens)
        elif transition.migration_over:
            self.span.event("migration failed", now, step=transition.failed_step)

    def _carry_out(self, action: do.RoutingAction, message: Any, now: float) -> None:
        """Carry out one action of the state machine. `message`: the data that came with the event
        that caused the action."""
        match action:
            case do.Place():
                self._effects.place(self, now)
            case do.OpenAttempt():
                self._open(action, now)
            case do.CloseAttempt():
                assignment = self._assignments.pop(action.attempt)
                self._effects.closed(self, assignment, action.lost)
            case do.SendAdmit():
                self._admit(action, now)
            case do.SendResume():
                resume = wire.Resume(
                    attempt=action.attempt,
                    epoch=self.state.session_epoch,
                    counts=[len(choice.generated_ids) for choice in self.progress.choices],
                )
                self._to_decode(action.attempt, resume=resume)
            case do.SendPrefillStart():
                self._start_prefill(action, now)
            case do.SendHold():
                self._to_decode(action.attempt, hold=wire.Hold(attempt=action.attempt))
            case do.SendMove():
                to = self._assignments[action.to]
                assert to.ticket is not None  # it was admitted with one
                move = wire.Move(attempt=action.attempt, to=to.id, ticket=to.ticket)
                move.kv_identity.CopyFrom(pb.KvIdentity(**to.decode.identity.parts()))
                self._to_decode(action.attempt, move=move)
            case do.SendStay():
                self._to_decode(action.attempt, stay=wire.Stay(attempt=action.attempt))
            case do.CancelAtDecode():
                cancel = wire.CancelAttempt(attempt=action.attempt, choices=action.choices)
                self._to_decode(action.attempt, cancel=cancel)
            case do.CancelAtPrefill():
                prefill = self._assignments[action.attempt].prefill
                if prefill is not None:
                    cancel = wire.CancelAttempt(attempt=action.attempt)
                    self._effects.send(prefill, wire.PrefillCommand(cancel=cancel))
            case do.RepeatAborts():
                choices = self.progress.choices
                if aborted := [i for i, c in enumerate(choices) if c.finish == pb.ABORTED]:
                    cancel = wire.CancelAttempt(attempt=action.attempt, choices=aborted)
                    self._to_decode(action.attempt, cancel=cancel)
            case do.ReleasePrefill():
                assignment = self._assignments[action.attempt]
                if assignment.prefill is not None:
                    assignment.prefill.forget_command(assignment.id)
                assignment.prefill = None
            case do.AnnouncePlacement():
                self._announce(self._assignments[action.attempt], now)
            case do.Adopt():
                self._go_on(self._assignments[action.attempt], message)
            case do.Forward():
                self._pass_on(self._assignments[action.attempt], message, now)
            case do.SendFinished():
                self._finish(self._assignments.get(action.attempt), message, now)
            case do.SendFailed():
                self._fail(action, now)
            case do.LogLoss():
                log.info("attempt lost: %s", action.reason, extra={"request": self.id})
                self.span.event("attempt lost", now, reason=action.reason)

    def _to_decode(self, attempt: bytes, **command: Any) -> None:
        """Send a command to the decode worker of an attempt. `command`: one keyword argument, by
        the name of the command's field in the proto."""
        self._effects.send(self._assignments[attempt].decode, wire.DecodeCommand(**command))

    def _open(self, action: do.OpenAttempt, now: float) -> None:
        if action.attempt not in self._assignments:
            worker = self._target if action.migrates else self._effects.find(action.decode)
            assert worker is not None  # the event says that it can be reached
            ids = self.progress.prefix_ids()[:-1] if action.migrates else []
            self._assignments[action.attempt] = Assignment(
                action.attempt, worker, None, ids, now, adopted=action.adopted
            )
        self._effects.opened(self, self._assignments[action.attempt], action, now)

    def _admit(self, action: do.SendAdmit, now: float) -> None:
        assignment = self._assignments[action.attempt]
        # A request that has had its first step has no queue deadline any more.
        queue_ms = 0 if self.progress.begun else remaining_ms(self.state.queue_deadline, now)
        timeout_ms = remaining_ms(self.state.deadline, now)
        epoch, crash_count = self.state.session_epoch, self.state.crash_count
        start = self.progress.to_start(epoch, crash_count, timeout_ms, queue_ms)
        admit = wire.Admit(attempt=assignment.id, min_shared_tokens=action.min_shared_tokens)
        sender = assignment.prefill
        source = self.assignment
        if source is not None and source is not assignment:  # a migration's target
            sender = source.decode
        if sender is not None:
            assert sender.incarnation == action.sender
            admit.prefill_incarnation = sender.incarnation
            admit.prefill_identity = sender.identity.digest
        parts, last_ids = send_ids(self.id, self.progress.prompt_ids)
        for part in parts:
            self._to_decode(assignment.id, ids_part=part)
        command = wire.DecodeCommand(admit=admit)
        command.admit.start.CopyFrom(start)
        command.admit.start.prompt_ids.extend(last_ids)  # last, so that they are not copied
        self._effects.send(assignment.decode, command)

    def _start_prefill(self, action: do.SendPrefillStart, now: float) -> None:
        assignment = self._assignments[action.attempt]
        worker = assignment.prefill
        if worker is None or worker.incarnation != action.prefill:
            worker = assignment.prefill = self._effects.find(action.prefill)
        assert worker is not None  # the event says that it can be reached
        start = wire.PrefillStart(
            attempt=assignment.id,
            ticket=assignment.ticket,
            cache_salt=self.progress.start.cache_salt,
            tenant=self.progress.start.tenant,
            priority=self.progress.start.priority,
            remaining_ms=remaining_ms(self.state.deadline, now),
            kv_identity=pb.KvIdentity(**assignment.decode.identity.parts()),
            request=self.id,
            trace_parent=self.progress.start.trace_parent,
            trace_state=self.progress.start.trace_state,
        )
        parts, last_ids = send_ids(assignment.id.hex(), assignment.ids)
        for part in parts:
            self._effects.send(worker, wire.PrefillCommand(ids_part=part))
        command = wire.PrefillCommand(start=start)
        command.start.ids.extend(last_ids)
        self._effects.send(worker, command)

    def _announce(self, assignment: Assignment, now: float) -> None:
        decode = assignment.decode
        workers = {
            "decode": decode.address,
            "prefill": _address(assignment.prefill, "none"),
        }
        self.span.event("attempt", now, attempt=assignment.id.hex(), **workers)
        self.placement = pb.Placement(
            attempt=assignment.id,
            decode_incarnation=decode.incarnation,
            decode_address=decode.address,
            identity=pb.KvIdentity(**(self.origin or decode.identity).parts()),
        )
        self._send_placed(assignment)

    def _send_placed(self, assignment: Assignment) -> None:
        placed = Placed(
            request=self.id,
            epoch=self.state.epoch,
            placement=self.placement,
            prefill_address=_address(assignment.prefill, ""),
            crash_count=self.state.crash_count,
            join_routers=assignment.decode.hello.join_routers,
        )
        self._effects.emit(self, RequestEvent(placed=placed))

    def _go_on(self, assignment: Assignment, message: wire.Resumed) -> None:
        if assignment.adopted and message.HasField("ticket"):
            assignment.ids = self.progress.prefix_ids()[:-1]
            self._ticket(message)
        elif assignment.adopted:
            self._counted = True  # by the previous router
        self._send_placed(assignment)

    def _pass_on(self, assignment: Assignment, fresh: Any, now: float) -> None:
        if fresh is None:
            return
        fresh.request = self.id
        self.origin = self.origin or assignment.decode.identity
        if isinstance(fresh, pb.PromptLogprobs):
            self._effects.emit(self, RequestEvent(prompt_logprobs=fresh))
            return
        fresh.epoch = self.state.epoch
        pooled = isinstance(fresh, pb.Embedding)
        if not assignment.adopted and (pooled or fresh.position == 0):
            first = self.beginning.token.record(assignment.id, assignment.began, now)
            if first:
                self._effects.waited(self, assignment.began - self.arrived)
            if first and self.span.recorded:
                self.span.phase("queue", self.arrived, assignment.began)
                self.span.event("first token", now)
        if pooled:
            self._effects.emit(self, RequestEvent(embedding=fresh))
            return
        self._effects.emit(self, RequestEvent(tokens=fresh))

    def _finish(
        self, assignment: Assignment | None, report: pb.Finished | None, now: float
    ) -> None:
        """Send the client Finished: the worker's report, completed by what only the router knows,
        or an empty one if every choice ended without a report."""
        finished = pb.Finished() if report is None or assignment is None else report
        finished.request, finished.epoch = self.id, self.state.epoch
        finished.inexact |= self.inexact
        if assignment is not None:
            self.beginning.complete(finished, self.state.num_attempts, assignment.id)
        self._end(RequestEvent(finished=finished), assignment, None, now)

    def _fail(self, action: do.SendFailed, now: float) -> None:
        error = action.error
        elsewhere = error is FailureReason.NO_WORKER_HERE
        if isinstance(error, FailureReason):
            error = ROUTER_ERRORS[error]
        assert isinstance(error, ServiceError)
        failed = pb.Failed(request=self.id, epoch=self.state.epoch, failure=error.to_failure())
        failed.attempt, failed.elsewhere = action.attempt, elsewhere
        failed.crash_count = self.state.crash_count
        event = RequestEvent(failed=failed)
        self._end(event, self._assignments.get(action.attempt), error, now)

    def _end(
        self,
        event: RequestEvent,
        assignment: Assignment | None,
        error: ServiceError | None,
        now: float,
    ) -> None:
        log.debug(
            "request ended: %s model=%s prefill=%s decode=%s tries=%d seconds=%.3f",
            "done" if error is None else f"failed ({error.message})",
            self.model,
            _address(assignment.prefill if assignment else None, "local"),
            _address(assignment.decode if assignment else None, "none"),
            self.state.num_attempts,
            now - self.arrived,
            extra={"request": self.id},
        )
        self.span.set(
            pdserve__attempts=self.state.num_attempts,
            pdserve__decode=_address(assignment.decode if assignment else None, "none"),
            pdserve__prefill=_address(assignment.prefill if assignment else None, "local"),
        )
        self.span.end("" if error is None else pb.ErrorCode.Name(error.code))
        self._effects.emit(self, event)
        served = error is None and assignment is not None
        self._effects.ended(self, now, error, served)


def _address(worker: Worker | None, default: str) -> str:
    return default if worker is None else worker.address
